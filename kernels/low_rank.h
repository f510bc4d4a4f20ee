// What an adapter adds to rows: h = x A, then out += h B. Each sum has an order of its own, whatever rows are beside it.

constexpr int chains = 4;

// The first lanes of 16 bits each, all 16 if count is more; the others are 0.
inline Floats load(const uint16_t* from, size_t count) {
    if (count >= lane_count)
        return load(from);
    uint16_t first[lane_count] = {};
    memcpy(first, from, count * sizeof(uint16_t));
    return load(first);
}

// Rows m to m + R. Chain c of a sum takes inputs c, c + 4, …; then chains 0 and 2 are added, 1 and 3, and both.
template <int R, class Element>
void project_rows(const LowRank& adapter, const FloatRows& from, size_t m, float* h, size_t stride) {
    const auto* const a = static_cast<const Element*>(adapter.a);
    const size_t whole = from.inputs / chains * chains;
    for (size_t j = 0; j < adapter.padded_rank; j += lane_count) {
        Floats sums[R * chains];
        unrolled<R * chains>([&](auto i) { sums[i] = all(0.0f); });
        const auto take = [&](size_t k, auto chain) {
            const Floats weight = load(a + k * adapter.padded_rank + j);
            unrolled<R>([&](auto r) {
                Floats& sum = sums[r * chains + chain];
                sum = fma(all(from.x[(m + r) * from.stride + k]), weight, sum);
            });
        };
        for (size_t k = 0; k < whole; k += chains)
            unrolled<chains>([&](auto chain) { take(k + chain, chain); });
        unrolled<chains>([&](auto chain) {
            if (whole + chain < from.inputs)
                take(whole + chain, chain);
        });
        unrolled<R>([&](auto r) {
            constexpr int at = r * chains;
            store(h + (m + r) * stride + j, (sums[at] + sums[at + 2]) + (sums[at + 1] + sums[at + 3]));
        });
    }
}

// Columns [column, end) of rows m to m + R. A sum goes on from what is there, in the order of ranks.
template <int R, class Element>
void expand_rows(const LowRank& adapter, const float* h, size_t stride, size_t m, size_t column, size_t end, float* out,
                 size_t out_stride) {
    constexpr int panels = 2;
    const auto* const b = static_cast<const Element*>(adapter.b);
    for (; column < end; column += panels * lane_count) {
        Floats sums[R * panels];
        size_t at[panels];
        unrolled<panels>([&](auto p) { at[p] = lesser(column + p * lane_count, end - 1); });
        unrolled<R * panels>([&](auto i) {
            constexpr int r = i / panels, p = i % panels;
            sums[i] = load(out + (m + r) * out_stride + at[p], end - at[p]);
        });
        for (size_t k = 0; k < adapter.rank; ++k)
            unrolled<panels>([&](auto p) {
                const Floats weight = load(b + k * adapter.width + at[p] - adapter.first, end - at[p]);
                unrolled<R>([&](auto r) {
                    Floats& sum = sums[r * panels + p];
                    sum = fma(all(h[(m + r) * stride + k]), weight, sum);
                });
            });
        unrolled<R * panels>([&](auto i) {
            constexpr int r = i / panels, p = i % panels;
            if (column + p * lane_count < end)
                store(out + (m + r) * out_stride + at[p], sums[i], end - at[p]);
        });
    }
}

// Path::project, two rows at a time.
inline void project(const LowRank& adapter, const FloatRows& from, size_t m, size_t last, float* h, size_t stride) {
    const auto rows = adapter.is_16 ? project_rows<2, uint16_t> : project_rows<2, float>;
    for (; m + 2 <= last; m += 2)
        rows(adapter, from, m, h, stride);
    if (m < last)
        (adapter.is_16 ? project_rows<1, uint16_t> : project_rows<1, float>)(adapter, from, m, h, stride);
}

// Path::expand, two rows at a time.
inline void expand(const LowRank& adapter, const float* h, size_t stride, size_t m, size_t last, size_t column, size_t end,
                   float* out, size_t out_stride) {
    const auto rows = adapter.is_16 ? expand_rows<2, uint16_t> : expand_rows<2, float>;
    for (; m + 2 <= last; m += 2)
        rows(adapter, h, stride, m, column, end, out, out_stride);
    if (m < last)
        (adapter.is_16 ? expand_rows<1, uint16_t> : expand_rows<1, float>)(adapter, h, stride, m, column, end, out,
                                                                            out_stride);
}
