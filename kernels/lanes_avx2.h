// Sixteen floats or integers in two AVX2 registers. lanes_scalar.h says what each function means.

struct Ints {
    __m256i low, high;
};

struct Floats {
    __m256 low, high;
};

inline Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline __m256 load_eight(const uint16_t* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats load(const uint16_t* from) { return {load_eight(from), load_eight(from + 8)}; }
inline void store(float* to, Floats a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats if_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
inline Floats greater(Floats a, Floats b) { return {_mm256_max_ps(b.low, a.low), _mm256_max_ps(b.high, a.high)}; }
inline Floats round_even(Floats a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}

inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Ints greater(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }

inline Ints to_ints(Floats whole) { return {_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high)}; }
inline Ints round_to_ints(Floats a) { return to_ints(a); }
inline Ints high_bytes(Ints a) {
    const Ints sum = a + all(128);
    return {_mm256_srai_epi32(sum.low, 8), _mm256_srai_epi32(sum.high, 8)};
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline Ints magnitude(Floats a) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(a.low), mask), _mm256_and_si256(_mm256_castps_si256(a.high), mask)};
}
inline Floats power_of_two(Ints a) {
    const Ints biased = a + all(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased.low, 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(biased.high, 23))};
}

inline Floats scaled(Floats a, Floats n) { return a * power_of_two(to_ints(n)); }

inline float sum(Floats a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum(Ints a) {
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline int32_t greatest(Ints a) {
    const __m256i eight = _mm256_max_epi32(a.low, a.high);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline float greatest(Floats a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// The lanes as int16, in order.
inline __m256i narrow(Ints a) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
}
inline void narrow(int16_t* to, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(a)); }
inline void narrow(int8_t* to, Ints a) {
    const __m256i words = narrow(a);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
