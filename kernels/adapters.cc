#include "adapters.h"

#include <algorithm>

#include "memory.h"

namespace kvasir {

Parts Parts::of(const Node& node) {
    const int64_t first = node.integer("part", 0), count = node.integer("parts", 0);
    if (first < 0 || count < 0)
        node.refuse("the attributes part and parts have to be at least 0");
    return {size_t(first), size_t(count)};
}

RowAdapters::RowAdapters(const Path& path, const Parts& own, const std::string& name, const Tensor& adapters,
                         const Tensor& table, size_t rows, size_t inputs, size_t outputs)
    : path(path), part_count(own.count), outputs(outputs) {
    const auto refuse = [&](const std::string& what) { throw Refusal("kvasir." + name + ": " + what); };
    const size_t entries = adapters.count(), repeats = rows / entries;
    const auto* const of_entries = static_cast<const int64_t*>(adapters.data);
    if (adapters.type != element_int64 || entries * repeats != rows)
        refuse("adapters is " + describe(adapters) + "; it has to be int64, and divide " + std::to_string(rows) + " rows");
    if (table.type != element_int64 || table.shape.size() != 3 || table.shape[2] != int64_t(table_numbers) ||
        size_t(table.shape[1]) < own.first + own.count)
        refuse("adapter_table is " + describe(table) + "; it has to be int64 [adapters, parts, " +
               std::to_string(table_numbers) + "]");
    std::vector<bool> is_used(size_t(table.shape[0]));
    for (size_t i = 0; i < entries; ++i) {
        const int64_t adapter = of_entries[i];
        if (adapter < -1 || adapter >= table.shape[0])
            refuse("adapters has " + std::to_string(adapter) + ", and adapter_table is " + describe(table));
        if (adapter >= 0 && !is_used[size_t(adapter)]) {
            is_used[size_t(adapter)] = true;
            used.push_back(size_t(adapter));
        }
    }
    if (used.empty())
        return;
    pair_rows(of_entries, rows, repeats);
    parts.resize(is_used.size() * part_count);
    for (size_t adapter : used) {
        size_t width = 0;
        for (size_t i = 0; i < part_count; ++i) {
            const auto* const at = static_cast<const int64_t*>(table.data) +
                                   (adapter * size_t(table.shape[1]) + own.first + i) * table_numbers;
            LowRank& part = parts[adapter * part_count + i];
            part = {reinterpret_cast<const void*>(at[0]), reinterpret_cast<const void*>(at[1]), size_t(at[2]),
                    round_up(size_t(at[2]), lane_count), size_t(at[3]), size_t(at[4]), at[5] != 0};
            if (!part.a)
                continue;
            if (at[2] < 1 || size_t(at[2]) > inputs + outputs || at[3] < 0 || at[3] % int64_t(lane_count) || at[4] < 1 || size_t(at[3]) > outputs ||
                size_t(at[4]) > outputs - size_t(at[3]) || !part.b)
                refuse("part " + std::to_string(own.first + i) + " of an adapter does not fit " + std::to_string(outputs) +
                       " outputs");
            width += part.padded_rank;
        }
        stride = std::max(stride, width);
    }
}

void RowAdapters::pair_rows(const int64_t* of_entries, size_t rows, size_t repeats) {
    for (size_t m = 0; m < rows; m += paired_rows) {
        starts.push_back(pairs.size());
        for (size_t row = m; row < std::min(m + paired_rows, rows); ++row) {
            const int64_t adapter = of_entries[row / repeats];
            const auto alone = std::find_if(pairs.begin() + std::ptrdiff_t(starts.back()), pairs.end(), [&](const Pair& pair) {
                return pair.count == 1 && int64_t(pair.adapter) == adapter;
            });
            if (alone != pairs.end()) {
                alone->step = row - alone->row;
                alone->count = 2;
            } else if (adapter >= 0) {
                pairs.push_back({size_t(adapter), row, 1, 1});
            }
        }
    }
    starts.push_back(pairs.size());
}

template <class Work>
void RowAdapters::for_each(size_t m, size_t last, Work work) const {
    for (size_t i = starts[m / paired_rows]; i < starts[(last + paired_rows - 1) / paired_rows]; ++i) {
        size_t at = 0;
        for (size_t p = 0; p < part_count; ++p)
            if (const LowRank& part = parts[pairs[i].adapter * part_count + p]; part.a) {
                work(part, at, pairs[i]);
                at += part.padded_rank;
            }
    }
}

void RowAdapters::project(const FloatRows& from, size_t m, size_t last, float* h) const {
    for_each(m, last, [&](const LowRank& part, size_t at, const Pair& pair) {
        const FloatRows rows{from.x + pair.row * from.stride, pair.step * from.stride, from.inputs};
        path.project(part, rows, pair.count, h + pair.row * stride + at, pair.step * stride);
    });
}

void RowAdapters::expand(const float* h, size_t m, size_t last, size_t column, size_t end, float* out) const {
    for_each(m, last, [&](const LowRank& part, size_t at, const Pair& pair) {
        const size_t begin = std::max(column, part.first), stop = std::min(end, part.first + part.width);
        if (begin < stop)
            path.expand(part, {h + pair.row * stride + at, pair.step * stride, part.rank}, pair.count, begin, stop,
                        out + pair.row * outputs, pair.step * outputs);
    });
}

}  // namespace kvasir
