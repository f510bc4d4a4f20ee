// Sums of products of rounded inputs and packed weights, by VNNI: four products of uint8 and int8 are added to a lane.

inline __m512i four_inputs(const int8_t* q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm512_set1_epi32(four);
}

// 24 sums fill most registers; the weights of 4 x 16 columns are read once for 6 rows.
struct BytesProduct {
    using Input = int8_t;
    static constexpr int rows = 6, panels = 4, zero_point = 128, weights_in_a_byte = 1;
    static constexpr bool scales_blocks = false;

    template <int R>
    static void multiply(const Input* q, size_t stride, const uint8_t* weights, size_t panel_bytes, size_t count,
                         Ints (&sums)[R][panels]) {
        __m512i total[R][panels];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < panels; ++p)
                total[r][p] = _mm512_setzero_si512();
        for (size_t k = 0; k < count; k += 4) {
            __m512i weight[panels];
            for (int p = 0; p < panels; ++p)
                weight[p] = _mm512_load_si512(weights + p * panel_bytes + k * lane_count);
            for (int r = 0; r < R; ++r) {
                const __m512i input = four_inputs(q + r * stride + k);
                for (int p = 0; p < panels; ++p)
                    total[r][p] = _mm512_dpbusd_epi32(total[r][p], weight[p], input);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < panels; ++p)
                sums[r][p].v = total[r][p];
    }
};

// A block of 32 inputs is eight registers once it is unpacked, which eight rows share.
struct NibblesProduct {
    using Input = int8_t;
    static constexpr int rows = 8, panels = 1, zero_point = 8, weights_in_a_byte = 2;
    static constexpr bool scales_blocks = true;

    template <int R>
    static void multiply(const Input* q, size_t stride, const uint8_t* weights, size_t, size_t, Ints (&sums)[R][panels]) {
        const __m512i low = _mm512_set1_epi8(15);
        __m512i weight[8];
        for (int i = 0; i < 4; ++i) {
            const __m512i both = _mm512_load_si512(weights + i * 64);
            weight[i] = _mm512_and_si512(both, low);
            weight[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        for (int r = 0; r < R; ++r) {
            __m512i total = _mm512_setzero_si512();
            for (int i = 0; i < 8; ++i)
                total = _mm512_dpbusd_epi32(total, weight[i], four_inputs(q + r * stride + i * 4));
            sums[r][0].v = total;
        }
    }
};
