// Sums of products of rounded inputs and packed weights, by VNNI: four products of uint8 and int8 are added to a lane.

inline __m512i four_inputs(const int8_t* q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

// A pointer whose origin gcc does not see: it would keep one for each of eight rows, which are more than there are registers.
inline const int8_t* hidden(const int8_t* pointer) {
    asm("" : "+r"(pointer));
    return pointer;
}

struct BytesProduct {
    using Input = int8_t;
    // 8 x 2 was fastest on Zen 4 of 6 x 4, 8 x 2, 10 x 2, 12 x 2 and 16 x 1: two panels fit the first cache.
    static constexpr int rows = 8, panels = 2, zero_point = 128, weights_in_a_byte = 1;
    static constexpr bool scales_blocks = false;

    template <int R, int panels, class Weights>
    [[gnu::flatten, gnu::noinline]] static void multiply(const Input* q, size_t stride, const Weights& weights,
                                                         size_t count, Ints (&sums)[R][panels]) {
        __m512i total[R][panels], weight[panels];
        unrolled<R>([&](auto r) { unrolled<panels>([&](auto p) { total[r][p] = _mm512_setzero_si512(); }); });
        for (size_t k = 0; k < count; k += 4) {
            unrolled<panels>([&](auto p) {
                weight[p] = _mm512_loadu_si512(weights.at(p, k));
                prefetch(weights.next(p, k));
            });
            const Input* const early = hidden(q + k);
            const Input* const late = hidden(early + 4 * stride);
            unrolled<R>([&](auto r) {
                const __m512i input = four_inputs((r < 4 ? early : late) + r % 4 * stride);
                unrolled<panels>([&](auto p) { total[r][p] = _mm512_dpbusd_epi32(total[r][p], weight[p], input); });
            });
        }
        unrolled<R>([&](auto r) { unrolled<panels>([&](auto p) { sums[r][p].v = total[r][p]; }); });
    }
};

// A block of 32 inputs is eight registers once it is unpacked, which eight rows share.
struct NibblesProduct {
    using Input = int8_t;
    static constexpr int rows = 8, panels = 1, zero_point = 8, weights_in_a_byte = 2;
    static constexpr bool scales_blocks = true;

    template <int R, int panels>
    [[gnu::flatten]] static void multiply(const Input* q, size_t stride, const Panels& weights, size_t,
                                          Ints (&sums)[R][panels]) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512i weight[8];
        unrolled<4>([&](auto i) {
            const uint8_t* const at = weights.data + i * 64;
            const __m512i both = _mm512_load_si512(at);
            prefetch(at + weights.panel_bytes);
            weight[i] = _mm512_and_si512(both, low);
            weight[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        });
        const Input* const early = hidden(q);
        const Input* const late = hidden(early + 4 * stride);
        unrolled<R>([&](auto r) {
            const Input* const row = (r < 4 ? early : late) + r % 4 * stride;
            __m512i total = _mm512_setzero_si512();
            unrolled<8>([&](auto i) {
                total = _mm512_dpbusd_epi32(total, weight[i], four_inputs(row + i * 4));
            });
            sums[r][0].v = total;
        });
    }
};
