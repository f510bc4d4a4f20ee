// Activations, written once over lanes: the same bits wherever a fused multiply-add is one.

// e to the power of each lane, within 2 ulp. Below -87 it is e^-87, above 88.37 infinity; NaN stays NaN.
// Range reduction and the polynomial of degree 7 are those of expf in the Cephes library (Moshier, 1992).
inline Floats exp(Floats x) {
    const Floats least = all(-87.0f), most = all(88.37f);
    const Floats t = if_less(x, least, least, if_less(most, x, most, x));
    const Floats n = round_even(t * all(1.44269504f));
    Floats r = fma(n, all(-0.693359375f), t);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return if_less(most, x, all(__builtin_inff()), p * power_of_two(to_ints(n)));
}

// The same, but 0 below -87.
inline Floats vanishing_exp(Floats x) { return if_less(x, all(-87.0f), all(0.0f), exp(x)); }

inline Floats negated(Floats x) { return all(-0.0f) - x; }

inline Floats sigmoid(Floats x) { return all(1.0f) / (all(1.0f) + exp(negated(x))); }

inline Floats tanh(Floats x) { return fma(all(2.0f), sigmoid(x + x), all(-1.0f)); }

// x * sigmoid(x).
inline Floats silu(Floats x) { return x / (all(1.0f) + exp(negated(x))); }

// x * sigmoid(1.702 x): Hendrycks and Gimpel, arXiv 1606.08415.
inline Floats quick_gelu(Floats x) { return x / (all(1.0f) + exp(all(-1.702f) * x)); }

// x (1 + tanh(u)) / 2 is x * sigmoid(2 u), of u = sqrt(2 / pi) (x + 0.044715 x^3): the same paper.
inline Floats gelu_tanh(Floats x) {
    const Floats cube = x * x * x;
    return x / (all(1.0f) + exp(all(-1.5957691216f) * fma(all(0.044715f), cube, x)));
}

// x (1 + erf(x / sqrt(2))) / 2. The upper tail of erf is formula 7.1.26 of Abramowitz and Stegun, within 1.5e-7;
// negative x take the tail itself, so nothing cancels.
inline Floats gelu(Floats x) {
    const Floats zero = all(0.0f);
    const Floats z = if_less(x, zero, negated(x), x);
    const Floats t = all(1.0f) / fma(all(0.3275911f * 0.70710678f), z, all(1.0f));
    Floats p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    const Floats tail = x * (all(0.5f) * p * t * exp(all(-0.5f) * x * x));
    return if_less(x, zero, tail, x - tail);
}

inline Floats relu(Floats x) { return if_less(x, all(0.0f), all(0.0f), x); }

inline Floats relu2(Floats x) { return relu(x) * relu(x); }

// log(1 + e^x) is max(x, 0) + log(1 + t) of t = e^-|x|, and log(1 + t) is 2 artanh(z) of z = t / (2 + t), at most 1/3.
inline Floats softplus(Floats x) {
    const Floats t = vanishing_exp(if_less(x, all(0.0f), x, negated(x)));
    const Floats z = t / (all(2.0f) + t), square = z * z;
    Floats p = all(0.14089167f);  // of artanh(z) / z; within 4e-9 of it
    p = fma(p, square, all(0.13980301f));
    p = fma(p, square, all(0.20012454f));
    p = fma(p, square, all(0.33333158f));
    p = fma(p, square, all(1.0f));
    return fma(z + z, p, relu(x));
}
