// The adapters of one run of a node: which row has which, and what they add to its outputs.
#pragma once

#include <string>
#include <vector>

#include "path.h"
#include "run.h"

namespace kvasir {

// A node's parts in an adapter: `count` from `first` on, as the attributes part and parts say; none without the latter.
struct Parts {
    size_t first = 0, count = 0;

    static Parts of(const Node&);
};

constexpr size_t table_numbers = 6;  // of a part: addresses of A and B, rank, first column, columns, and is_16

class RowAdapters {
public:
    // adapters: int64 [n], -1 for none, where n divides the rows: each has as many rows, one behind the other.
    // table: int64 [adapters, parts, table_numbers].
    RowAdapters(const Path&, const Parts&, const std::string& name, const Tensor& adapters, const Tensor& table, size_t rows,
                size_t inputs, size_t outputs);

    bool are_none() const { return used.empty(); }
    size_t width() const { return stride; }  // floats of a row of h

    // Compute rows [m, last) of h of what their product reads.
    void project(const FloatRows& from, size_t m, size_t last, float* h) const;
    // Add to columns [column, end) of rows [m, last) of out.
    void expand(const float* h, size_t m, size_t last, size_t column, size_t end, float* out) const;

private:
    // Call work(parts, first, last) for neighbours with the same adapter.
    template <class Work>
    void for_each(size_t m, size_t last, Work work) const;

    const Path& path;
    const size_t part_count, outputs, repeats;
    const int64_t* const of_rows;
    std::vector<LowRank> parts;  // [adapters][part_count]
    std::vector<size_t> used;    // adapters of some row
    size_t stride = 0;
};

}  // namespace kvasir
