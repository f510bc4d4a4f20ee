// Sums of products of rounded inputs and packed weights, by AVX2.

// Adding pairs of bytes in 16 bits would overflow, so both factors become 16 bits and pairs are added in 32. A register
// has four columns of four inputs: two sums for each column, which are added at the end.
struct BytesProduct {
    using Input = int16_t;
    static constexpr int rows = 2, panels = 1, zero_point = 128, weights_in_a_byte = 1;
    static constexpr bool scales_blocks = false;

    template <int R, int panels, class Weights>
    [[gnu::flatten, gnu::noinline]] static void multiply(const Input* q, size_t stride, const Weights& weights,
                                                         size_t count, Ints (&sums)[R][panels]) {
        __m256i total[R][4], input[R];
        unrolled<R>([&](auto r) { unrolled<4>([&](auto i) { total[r][i] = _mm256_setzero_si256(); }); });
        for (size_t k = 0; k < count; k += 4) {
            const uint8_t* const at = weights.at(0, k);
            prefetch(weights.next(0, k));
            unrolled<R>([&](auto r) {
                int64_t four;
                memcpy(&four, q + r * stride + k, sizeof four);
                input[r] = _mm256_set1_epi64x(four);
            });
            unrolled<4>([&](auto i) {
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + i * 16));
                const __m256i weight = _mm256_cvtepu8_epi16(bytes);
                unrolled<R>([&](auto r) {
                    total[r][i] = _mm256_add_epi32(total[r][i], _mm256_madd_epi16(weight, input[r]));
                });
            });
        }
        unrolled<R>([&](auto r) {
            sums[r][0].low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(total[r][0], total[r][1]), 0xd8);
            sums[r][0].high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(total[r][2], total[r][3]), 0xd8);
        });
    }
};

// Here 16 bits are enough for a block: eight pairs of products of at most 15 * 127 are 30,480.
struct NibblesProduct {
    using Input = int8_t;
    static constexpr int rows = 4, panels = 1, zero_point = 8, weights_in_a_byte = 2;
    static constexpr bool scales_blocks = true;

    template <int R, int panels>
    [[gnu::flatten]] static void multiply(const Input* q, size_t stride, const Panels& weights, size_t,
                                          Ints (&sums)[R][panels]) {
        const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        __m256i total[R][2];
        unrolled<R>([&](auto r) { unrolled<2>([&](auto half) { total[r][half] = _mm256_setzero_si256(); }); });
        unrolled<4>([&](auto i) {
            unrolled<2>([&](auto half) {
                const uint8_t* const at = weights.data + i * 64 + half * 32;
                const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
                prefetch(at + weights.panel_bytes);
                const __m256i first = _mm256_and_si256(both, low);
                const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                unrolled<R>([&](auto r) {
                    const Input* const from = q + r * stride + i * 4;
                    __m256i& pairs = total[r][half];
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(first, four_inputs(from)));
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(second, four_inputs(from + 16)));
                });
            });
        });
        unrolled<R>([&](auto r) {
            sums[r][0] = {_mm256_madd_epi16(total[r][0], ones), _mm256_madd_epi16(total[r][1], ones)};
        });
    }

    static __m256i four_inputs(const Input* q) {
        int32_t four;
        memcpy(&four, q, sizeof four);
        return _mm256_set1_epi32(four);
    }
};
