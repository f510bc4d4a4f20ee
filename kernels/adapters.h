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
constexpr size_t paired_rows = 8;    // among which rows of the same adapter are computed two at a time

class RowAdapters {
public:
    // adapters: int64 [n], -1 for none, where n divides the rows: each has as many rows, one behind the other. Of n = 0
    // no row has one.
    // table: int64 [adapters, parts, table_numbers].
    RowAdapters(const Path&, const Parts&, const std::string& name, const Tensor& adapters, const Tensor& table, size_t rows,
                size_t inputs, size_t outputs);

    bool are_none() const { return used.empty(); }
    size_t width() const { return stride; }  // floats of a row of h

    // Compute rows [m, last) of h of what their product reads. m is a multiple of paired_rows, as below.
    void project(const FloatRows& from, size_t m, size_t last, float* h) const;
    // Add to columns [column, end) of rows [m, last) of out.
    void expand(const float* h, size_t m, size_t last, size_t column, size_t end, float* out) const;

private:
    // Rows of one adapter: the first, and how far the second is behind it, if there are two.
    struct Pair {
        size_t adapter, row, step, count;
    };

    // Call work(part, place in a row of h, pair) for each part of the adapters of rows [m, last).
    template <class Work>
    void for_each(size_t m, size_t last, Work work) const;

    void pair_rows(const int64_t* of_entries, size_t rows, size_t repeats);

    const Path& path;
    const size_t part_count, outputs;
    std::vector<LowRank> parts;  // [adapters][part_count]
    std::vector<size_t> used;    // adapters of some row
    std::vector<Pair> pairs;     // by paired_rows, of which `starts` has the first
    std::vector<size_t> starts;
    size_t stride = 0;
};

}  // namespace kvasir
