// Sixteen floats or integers without vector instructions: the meaning of the other lanes_*.h.

struct Ints {
    int32_t lane[16];
};

struct Floats {
    float lane[16];
};

// Apply an expression of i to every lane.
#define EACH_LANE(Type, expression)              \
    Type result;                                 \
    for (int i = 0; i < 16; ++i)                 \
        result.lane[i] = (expression);           \
    return result

inline Floats all(float value) { EACH_LANE(Floats, value); }
inline Ints all(int32_t value) { EACH_LANE(Ints, value); }
inline Floats load(const float* from) { EACH_LANE(Floats, from[i]); }
// Of numbers whose lower 16 bits are zeros, and left out.
inline Floats load(const uint16_t* from) {
    uint32_t bits[16];
    for (int i = 0; i < 16; ++i)
        bits[i] = uint32_t(from[i]) << 16;
    Floats result;
    memcpy(result.lane, bits, sizeof bits);
    return result;
}
inline void store(float* to, Floats a) { memcpy(to, a.lane, sizeof a.lane); }

inline Floats operator+(Floats a, Floats b) { EACH_LANE(Floats, a.lane[i] + b.lane[i]); }
inline Floats operator-(Floats a, Floats b) { EACH_LANE(Floats, a.lane[i] - b.lane[i]); }
inline Floats operator*(Floats a, Floats b) { EACH_LANE(Floats, a.lane[i] * b.lane[i]); }
inline Floats operator/(Floats a, Floats b) { EACH_LANE(Floats, a.lane[i] / b.lane[i]); }
inline Floats fma(Floats a, Floats b, Floats c) {
    EACH_LANE(Floats, __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
// a < b ? yes : no, which is no for NaN.
inline Floats if_less(Floats a, Floats b, Floats yes, Floats no) {
    EACH_LANE(Floats, a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]);
}
// a < b ? b : a, which is a where either is NaN.
inline Floats greater(Floats a, Floats b) { EACH_LANE(Floats, a.lane[i] < b.lane[i] ? b.lane[i] : a.lane[i]); }
inline Floats round_even(Floats a) { EACH_LANE(Floats, __builtin_rintf(a.lane[i])); }

inline Ints operator+(Ints a, Ints b) { EACH_LANE(Ints, a.lane[i] + b.lane[i]); }
inline Ints operator-(Ints a, Ints b) { EACH_LANE(Ints, a.lane[i] - b.lane[i]); }
inline Ints greater(Ints a, Ints b) { EACH_LANE(Ints, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }

inline Ints to_ints(Floats whole) { EACH_LANE(Ints, int32_t(whole.lane[i])); }
inline Ints round_to_ints(Floats a) { return to_ints(round_even(a)); }
// a / 256, rounded so that the rest is from -128 to 127.
inline Ints high_bytes(Ints a) { EACH_LANE(Ints, (a.lane[i] + 128) >> 8); }
inline Floats to_floats(Ints a) { EACH_LANE(Floats, float(a.lane[i])); }
// The bits of |a|, whose order is that of the numbers; NaN is above infinity.
inline Ints magnitude(Floats a) {
    Ints bits;
    memcpy(bits.lane, a.lane, sizeof bits.lane);
    EACH_LANE(Ints, bits.lane[i] & 0x7fffffff);
}
// 2 to the power of each, of -126 to 127.
inline Floats power_of_two(Ints a) {
    Floats result;
    for (int i = 0; i < 16; ++i)
        a.lane[i] = (a.lane[i] + 127) << 23;
    memcpy(result.lane, a.lane, sizeof a.lane);
    return result;
}

// a times 2 to the power of n, which is whole, from -126 to 127.
inline Floats scaled(Floats a, Floats n) { return a * power_of_two(to_ints(n)); }

#undef EACH_LANE

// Lanes i and i + 8, then i and i + 4, i and i + 2, i and i + 1.
inline float sum(Floats a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            a.lane[i] = a.lane[i] + a.lane[i + half];
    return a.lane[0];
}
inline int32_t sum(Ints a) {
    int32_t result = 0;
    for (int32_t lane : a.lane)
        result += lane;
    return result;
}
inline int32_t greatest(Ints a) {
    int32_t result = a.lane[0];
    for (int32_t lane : a.lane)
        result = lane > result ? lane : result;
    return result;
}
inline float greatest(Floats a) {
    float result = a.lane[0];
    for (float lane : a.lane)
        result = lane > result ? lane : result;
    return result;
}
// The low bytes.
inline void narrow(int8_t* to, Ints a) {
    for (int i = 0; i < 16; ++i)
        to[i] = int8_t(a.lane[i]);
}
