// Sums of products of rounded inputs and packed weights without vector instructions.

struct BytesProduct {
    using Input = int8_t;
    static constexpr int rows = 1, panels = 1, zero_point = 128, weights_in_a_byte = 1;
    static constexpr bool scales_blocks = false;

    // sums[r][p], of 16 columns each, = sum over k < count of q[r][k] * (weight + zero_point).
    template <int R, int panels, class Weights>
    static void multiply(const Input* q, size_t, const Weights& weights, size_t count, Ints (&sums)[R][panels]) {
        sums[0][0] = all(0);
        for (size_t k = 0; k < count; ++k)
            for (size_t n = 0; n < lane_count; ++n)
                sums[0][0].lane[n] += q[k] * weights.at(0, k / 4 * 4)[n * 4 + k % 4];
    }
};

struct NibblesProduct {
    using Input = int8_t;
    static constexpr int rows = 1, panels = 1, zero_point = 8, weights_in_a_byte = 2;
    static constexpr bool scales_blocks = true;

    template <int R, int panels>
    static void multiply(const Input* q, size_t, const Panels& weights, size_t count, Ints (&sums)[R][panels]) {
        sums[0][0] = all(0);
        for (size_t k = 0; k < count; ++k)
            for (size_t n = 0; n < lane_count; ++n) {
                const uint8_t both = weights.data[k % 16 / 4 * 64 + n * 4 + k % 4];
                sums[0][0].lane[n] += q[k] * (k < 16 ? both & 15 : both >> 4);
            }
    }
};
