// Sums of products of rounded inputs and packed weights, by the dot products of Armv8.2: a register has four columns of
// four inputs, and an instruction adds all their products with the four inputs in one lane of another register.

template <int R>
inline void clear(int32x4_t (&total)[R][4]) {
    unrolled<R>([&](auto r) { unrolled<4>([&](auto i) { total[r][i] = vdupq_n_s32(0); }); });
}

// Add 16 columns of four inputs, those of `lane` in each row.
template <int R, int lane>
inline void add_dots(int32x4_t (&total)[R][4], const int8x16_t (&weight)[4], const int8x16_t (&input)[R]) {
    unrolled<R>([&](auto r) {
        unrolled<4>([&](auto i) { total[r][i] = vdotq_laneq_s32(total[r][i], weight[i], input[r], lane); });
    });
}

template <int R>
inline void save(Ints (&sums)[R][1], const int32x4_t (&total)[R][4]) {
    unrolled<R>([&](auto r) { unrolled<4>([&](auto i) { sums[r][0].part[i] = total[r][i]; }); });
}

struct BytesProduct {
    using Input = int8_t;
    // The instruction takes signed weights, so packing adds nothing.
    static constexpr int rows = 4, panels = 1, zero_point = 0, weights_in_a_byte = 1;
    static constexpr bool scales_blocks = false;

    template <int R, int panels, class Weights>
    [[gnu::flatten, gnu::noinline]] static void multiply(const Input* q, size_t stride, const Weights& weights,
                                                         size_t count, Ints (&sums)[R][panels]) {
        int32x4_t total[R][4];
        int8x16_t input[R], weight[4];
        clear(total);
        for (size_t k = 0; k < count; k += 16) {
            unrolled<R>([&](auto r) { input[r] = vld1q_s8(q + r * stride + k); });
            unrolled<4>([&](auto lane) {
                const uint8_t* const at = weights.at(0, k + lane * 4);
                prefetch(weights.next(0, k + lane * 4));
                unrolled<4>([&](auto i) {
                    const uint8x16_t bytes = vld1q_u8(at + i * 16);
                    weight[i] = vreinterpretq_s8_u8(Weights::adds_128 ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes);
                });
                add_dots<R, decltype(lane)::number>(total, weight, input);
            });
        }
        save(sums, total);
    }
};

struct NibblesProduct {
    using Input = int8_t;
    static constexpr int rows = 4, panels = 1, zero_point = 8, weights_in_a_byte = 2;
    static constexpr bool scales_blocks = true;

    template <int R, int panels>
    [[gnu::flatten, gnu::noinline]] static void multiply(const Input* q, size_t stride, const Panels& weights, size_t,
                                                         Ints (&sums)[R][panels]) {
        int32x4_t total[R][4];
        int8x16_t first[R], second[R], low[4], high[4];
        clear(total);
        unrolled<R>([&](auto r) {
            first[r] = vld1q_s8(q + r * stride);
            second[r] = vld1q_s8(q + r * stride + 16);
        });
        unrolled<4>([&](auto lane) {
            const uint8_t* const at = weights.data + lane * 64;
            prefetch(at + weights.panel_bytes);
            unrolled<4>([&](auto i) {
                const uint8x16_t both = vld1q_u8(at + i * 16);
                low[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                high[i] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
            });
            add_dots<R, decltype(lane)::number>(total, low, first);
            add_dots<R, decltype(lane)::number>(total, high, second);
        });
        save(sums, total);
    }
};
