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
    : path(path),
      part_count(own.count),
      outputs(outputs),
      repeats(adapters.count() ? std::max<size_t>(rows / adapters.count(), 1) : 1),
      of_rows(static_cast<const int64_t*>(adapters.data)) {
    const auto refuse = [&](const std::string& what) { throw Refusal("kvasir." + name + ": " + what); };
    if (adapters.type != element_int64 || adapters.count() * repeats != rows)
        refuse("adapters is " + describe(adapters) + "; it has to be int64, and divide " + std::to_string(rows) + " rows");
    if (table.type != element_int64 || table.shape.size() != 3 || table.shape[2] != int64_t(table_numbers) ||
        size_t(table.shape[1]) < own.first + own.count)
        refuse("adapter_table is " + describe(table) + "; it has to be int64 [adapters, parts, " +
               std::to_string(table_numbers) + "]");
    std::vector<bool> is_used(size_t(table.shape[0]));
    for (size_t i = 0; i < adapters.count(); ++i) {
        if (of_rows[i] < -1 || of_rows[i] >= table.shape[0])
            refuse("adapters has " + std::to_string(of_rows[i]) + ", and adapter_table is " + describe(table));
        if (of_rows[i] >= 0 && !is_used[size_t(of_rows[i])]) {
            is_used[size_t(of_rows[i])] = true;
            used.push_back(size_t(of_rows[i]));
        }
    }
    if (used.empty())
        return;
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
            if (at[2] < 1 || size_t(at[2]) > inputs + outputs || at[3] < 0 || at[4] < 1 || size_t(at[3]) > outputs ||
                size_t(at[4]) > outputs - size_t(at[3]) || !part.b)
                refuse("part " + std::to_string(own.first + i) + " of an adapter does not fit " + std::to_string(outputs) +
                       " outputs");
            width += part.padded_rank;
        }
        stride = std::max(stride, width);
    }
}

template <class Work>
void RowAdapters::for_each(size_t m, size_t last, Work work) const {
    while (m < last) {
        const int64_t adapter = of_rows[m / repeats];
        size_t end = m + 1;
        while (end < last && of_rows[end / repeats] == adapter)
            ++end;
        if (adapter >= 0) {
            size_t at = 0;
            for (size_t i = 0; i < part_count; ++i)
                if (const LowRank& part = parts[size_t(adapter) * part_count + i]; part.a) {
                    work(part, at, m, end);
                    at += part.padded_rank;
                }
        }
        m = end;
    }
}

void RowAdapters::project(const FloatRows& from, size_t m, size_t last, float* h) const {
    for_each(m, last, [&](const LowRank& part, size_t at, size_t first, size_t end) {
        path.project(part, from, first, end, h + at, stride);
    });
}

void RowAdapters::expand(const float* h, size_t m, size_t last, size_t column, size_t end, float* out) const {
    for_each(m, last, [&](const LowRank& part, size_t at, size_t first, size_t after) {
        const size_t begin = std::max(column, part.first), stop = std::min({end, part.first + part.width, outputs});
        if (begin < stop)
            path.expand(part, h + at, stride, first, after, begin, stop, out, outputs);
    });
}

}  // namespace kvasir
