// Sixteen floats or integers in four NEON registers. lanes_scalar.h says what each function means.

struct Ints {
    int32x4_t part[4];
};

struct Floats {
    float32x4_t part[4];
};

// Apply an expression of i to every register.
#define EACH_PART(Type, expression)       \
    Type result;                          \
    for (int i = 0; i < 4; ++i)           \
        result.part[i] = (expression);    \
    return result

inline Floats all(float value) { EACH_PART(Floats, vdupq_n_f32(value)); }
inline Ints all(int32_t value) { EACH_PART(Ints, vdupq_n_s32(value)); }
inline Floats load(const float* from) { EACH_PART(Floats, vld1q_f32(from + 4 * i)); }
inline Floats load(const uint16_t* from) {
    EACH_PART(Floats, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)));
}
inline void store(float* to, Floats a) {
    for (int i = 0; i < 4; ++i)
        vst1q_f32(to + 4 * i, a.part[i]);
}

inline Floats operator+(Floats a, Floats b) { EACH_PART(Floats, vaddq_f32(a.part[i], b.part[i])); }
inline Floats operator-(Floats a, Floats b) { EACH_PART(Floats, vsubq_f32(a.part[i], b.part[i])); }
inline Floats operator*(Floats a, Floats b) { EACH_PART(Floats, vmulq_f32(a.part[i], b.part[i])); }
inline Floats operator/(Floats a, Floats b) { EACH_PART(Floats, vdivq_f32(a.part[i], b.part[i])); }
inline Floats fma(Floats a, Floats b, Floats c) { EACH_PART(Floats, vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
inline Floats if_less(Floats a, Floats b, Floats yes, Floats no) {
    EACH_PART(Floats, vbslq_f32(vcltq_f32(a.part[i], b.part[i]), yes.part[i], no.part[i]));
}
inline Floats greater(Floats a, Floats b) { return if_less(a, b, b, a); }
inline Floats round_even(Floats a) { EACH_PART(Floats, vrndnq_f32(a.part[i])); }

inline Ints operator+(Ints a, Ints b) { EACH_PART(Ints, vaddq_s32(a.part[i], b.part[i])); }
inline Ints operator-(Ints a, Ints b) { EACH_PART(Ints, vsubq_s32(a.part[i], b.part[i])); }
inline Ints greater(Ints a, Ints b) { EACH_PART(Ints, vmaxq_s32(a.part[i], b.part[i])); }

inline Ints to_ints(Floats whole) { EACH_PART(Ints, vcvtq_s32_f32(whole.part[i])); }
inline Ints round_to_ints(Floats a) { EACH_PART(Ints, vcvtnq_s32_f32(a.part[i])); }
inline Ints high_bytes(Ints a) { EACH_PART(Ints, vrshrq_n_s32(a.part[i], 8)); }
inline Floats to_floats(Ints a) { EACH_PART(Floats, vcvtq_f32_s32(a.part[i])); }
inline Ints magnitude(Floats a) {
    EACH_PART(Ints, vandq_s32(vreinterpretq_s32_f32(a.part[i]), vdupq_n_s32(0x7fffffff)));
}
inline Floats power_of_two(Ints a) {
    EACH_PART(Floats, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a.part[i], vdupq_n_s32(127)), 23)));
}

#undef EACH_PART

inline Floats scaled(Floats a, Floats n) { return a * power_of_two(to_ints(n)); }

inline float sum(Floats a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline int32_t sum(Ints a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[2]), vaddq_s32(a.part[1], a.part[3])));
}
inline int32_t greatest(Ints a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.part[0], a.part[2]), vmaxq_s32(a.part[1], a.part[3])));
}
inline float greatest(Floats a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.part[0], a.part[2]), vmaxq_f32(a.part[1], a.part[3])));
}
inline void narrow(int8_t* to, Ints a) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a.part[0]), vmovn_s32(a.part[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(a.part[2]), vmovn_s32(a.part[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
