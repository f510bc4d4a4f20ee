// What an adapter adds to rows: h = x A, then out += h B. Each sum has an order of its own, whatever rows are beside it.

constexpr int chains = 4;

// R rows. Chain c of a sum takes inputs c, c + 4, …; then chains 0 and 2 are added, 1 and 3, and both.
template <int R, class Element>
void project_rows(const LowRank& adapter, const FloatRows& from, float* h, size_t stride) {
    const auto* const a = static_cast<const Element*>(adapter.a);
    const size_t whole = from.inputs / chains * chains;
    for (size_t j = 0; j < adapter.padded_rank; j += lane_count) {
        Floats sums[R * chains];
        unrolled<R * chains>([&](auto i) { sums[i] = all(0.0f); });
        const auto take = [&](size_t k, auto chain) {
            const Floats weight = load(a + k * adapter.padded_rank + j);
            unrolled<R>([&](auto r) {
                Floats& sum = sums[r * chains + chain];
                sum = fma(all(from.x[r * from.stride + k]), weight, sum);
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
            store(h + r * stride + j, (sums[at] + sums[at + 2]) + (sums[at + 1] + sums[at + 3]));
        });
    }
}

// Columns [column, end) of R rows. A sum goes on from what is there, in the order of ranks.
template <int R, class Element>
void expand_rows(const LowRank& adapter, const FloatRows& h, size_t column, size_t end, float* out, size_t stride) {
    constexpr int panels = 4 / R;
    const auto* const b = static_cast<const Element*>(adapter.b) + (column - adapter.first) * adapter.rank;
    const size_t panel = adapter.rank * lane_count, last = (end - column - 1) / lane_count;
    for (size_t p = 0; p <= last; p += panels) {
        Floats sums[R * panels];
        size_t at[panels];  // beyond the last panel it is computed again, and not stored
        unrolled<panels>([&](auto i) { at[i] = lesser(p + i, last); });
        const auto place = [&](auto i) { return column + at[i] * lane_count; };
        unrolled<R * panels>([&](auto i) {
            constexpr Constant<i % panels> q;
            sums[i] = load(out + i / panels * stride + place(q), end - place(q));
        });
        for (size_t k = 0; k < adapter.rank; ++k)
            unrolled<panels>([&](auto i) {
                const Floats weight = load(b + at[i] * panel + k * lane_count);
                unrolled<R>([&](auto r) {
                    Floats& sum = sums[r * panels + i];
                    sum = fma(all(h.x[r * h.stride + k]), weight, sum);
                });
            });
        unrolled<R * panels>([&](auto i) {
            constexpr Constant<i % panels> q;
            if (p + q <= last)
                store(out + i / panels * stride + place(q), sums[i], end - place(q));
        });
    }
}

// Path::project.
inline void project(const LowRank& adapter, const FloatRows& from, size_t count, float* h, size_t stride) {
    const auto one = adapter.is_16 ? project_rows<1, uint16_t> : project_rows<1, float>;
    const auto two = adapter.is_16 ? project_rows<2, uint16_t> : project_rows<2, float>;
    (count == 2 ? two : one)(adapter, from, h, stride);
}

// Path::expand.
inline void expand(const LowRank& adapter, const FloatRows& h, size_t count, size_t column, size_t end, float* out,
                   size_t stride) {
    const auto one = adapter.is_16 ? expand_rows<1, uint16_t> : expand_rows<1, float>;
    const auto two = adapter.is_16 ? expand_rows<2, uint16_t> : expand_rows<2, float>;
    (count == 2 ? two : one)(adapter, h, column, end, out, stride);
}

#include "recurrence.h"
