// Sixteen floats or integers in one AVX-512 register. lanes_scalar.h says what each function means.

struct Ints {
    __m512i v;
};

struct Floats {
    __m512 v;
};

inline Floats all(float value) { return {_mm512_set1_ps(value)}; }
inline Ints all(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* to, Floats a) { _mm512_storeu_ps(to, a.v); }

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats if_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Floats greater(Floats a, Floats b) { return {_mm512_max_ps(b.v, a.v)}; }
inline Floats round_even(Floats a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints greater(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }

inline Ints to_ints(Floats whole) { return {_mm512_cvtps_epi32(whole.v)}; }
inline Ints round_to_ints(Floats a) { return to_ints(a); }
inline Ints high_bytes(Ints a) { return {_mm512_srai_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(128)), 8)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints magnitude(Floats a) {
    return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline Floats power_of_two(Ints a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(127)), 23))};
}

inline Floats scaled(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t greatest(Ints a) { return _mm512_reduce_max_epi32(a.v); }
inline float greatest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline void narrow(int8_t* to, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a.v));
}
