// The work before a product: a row of floats becomes int8 with a scale for each block.

// y [K] = act(x), times the second half of x if the layer is gated.
template <Floats (*act)(Floats)>
void activate(const Layer& layer, const float* x, float* y) {
    for (size_t k = 0; k < layer.inputs; k += lane_count) {
        const size_t count = layer.inputs - k;
        Floats value = load(x + k, count);
        if (layer.limit > 0.0f) {
            const Floats limit = all(layer.limit), least = all(-layer.limit), gated = load(x + layer.inputs + k, count);
            const Floats cut = if_less(limit, gated, limit, if_less(gated, least, least, gated));
            value = act(if_less(limit, value, limit, value)) * (cut + all(1.0f));
        } else {
            value = act(value);
            if (layer.gated)
                value = value * load(x + layer.inputs + k, count);
        }
        store(y + k, value, count);
    }
}

inline Floats same(Floats x) { return x; }

inline void activate(const Layer& layer, const float* x, float* y) {
    switch (layer.activation) {
    case Activation::none: return activate<same>(layer, x, y);
    case Activation::silu: return activate<silu>(layer, x, y);
    case Activation::gelu: return activate<gelu>(layer, x, y);
    case Activation::gelu_tanh: return activate<gelu_tanh>(layer, x, y);
    case Activation::quick_gelu: return activate<quick_gelu>(layer, x, y);
    case Activation::relu: return activate<relu>(layer, x, y);
    case Activation::relu2: return activate<relu2>(layer, x, y);
    case Activation::sigmoid: return activate<sigmoid>(layer, x, y);
    case Activation::tanh: return activate<tanh>(layer, x, y);
    case Activation::exp: return activate<vanishing_exp>(layer, x, y);
    case Activation::softplus: return activate<softplus>(layer, x, y);
    }
}

// y [K] = e^(x - largest) / sum of these. x may be y.
inline void softmax(size_t inputs, const float* x, float* y) {
    float largest = x[0];
    for (size_t k = 1; k < inputs; ++k)
        largest = largest < x[k] ? x[k] : largest;
    Floats total = all(0.0f);
    for (size_t k = 0; k < inputs; k += lane_count) {
        store(y + k, vanishing_exp(load(x + k, inputs - k) - all(largest)), inputs - k);
        total = total + load(y + k, inputs - k);  // in which missing lanes are 0
    }
    const Floats whole = all(sum(total));
    for (size_t k = 0; k < inputs; k += lane_count)
        store(y + k, load(y + k, inputs - k) / whole, inputs - k);
}

// y [K] = (x - mean) / sqrt(mean of squares + epsilon) * weight + bias; RMS norms take 0 for the mean. x may be y.
// Of l2, y = x / sqrt(sum of squares), or / epsilon if that is larger.
inline void normalise(const Layer& layer, const float* x, float* y) {
    const size_t inputs = layer.inputs;
    if (layer.norm == Norm::softmax)
        return softmax(inputs, x, y);
    const float count = float(inputs);
    if (layer.norm == Norm::layer) {
        Floats total = all(0.0f);
        for (size_t k = 0; k < inputs; k += lane_count)
            total = total + load(x + k, inputs - k);
        const Floats mean = all(sum(total) / count);
        for (size_t k = 0; k < inputs; k += lane_count)
            store(y + k, load(x + k, inputs - k) - mean, inputs - k);
        x = y;
    }
    Floats squares = all(0.0f);
    for (size_t k = 0; k < inputs; k += lane_count) {
        const Floats value = load(x + k, inputs - k);
        squares = fma(value, value, squares);
    }
    const float length = __builtin_sqrtf(layer.norm == Norm::l2 ? sum(squares) : sum(squares) / count + layer.epsilon);
    const Floats factor = all(1.0f / (layer.norm == Norm::l2 && length < layer.epsilon ? layer.epsilon : length));
    for (size_t k = 0; k < inputs; k += lane_count) {
        Floats value = load(x + k, inputs - k) * factor;
        if (layer.norm_weight)
            value = value * load(layer.norm_weight + k, inputs - k);
        if (layer.norm_bias)
            value = value + load(layer.norm_bias + k, inputs - k);
        store(y + k, value, inputs - k);
    }
}

// y [K] = H x. Both are eight parts; part i of H x is the sum of parts j of x, each minus where i and j have an odd number
// of common bits. x may be y.
inline void mix(const Layer& layer, const float* x, float* y) {
    const size_t part = layer.inputs / mixed_parts;
    for (size_t k = 0; k < part; k += lane_count) {
        Floats parts[mixed_parts];
        unrolled<mixed_parts>([&](auto i) { parts[i] = load(x + i * part + k, part - k); });
        unrolled<3>([&](auto step) {
            unrolled<mixed_parts / 2>([&](auto pair) {
                constexpr int half = 1 << step, low = pair / half * 2 * half + pair % half;
                const Floats first = parts[low], second = parts[low + half];
                parts[low] = first + second;
                parts[low + half] = first - second;
            });
        });
        unrolled<mixed_parts>([&](auto i) { store(y + i * part + k, parts[i], part - k); });
    }
}

// Return s, of which the largest value of these magnitudes is `most`: NaN of a NaN or an infinity, 0 where it would be
// denormal.
inline float scale_for(Ints magnitudes, float most) {
    const int32_t bits = greatest(magnitudes);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const float scale = largest / most;
    if (scale >= smallest_normal && scale <= largest_finite)
        return scale;
    return scale < smallest_normal ? 0.0f : __builtin_nanf("");
}

// Round y [count] to q [padded], by s = max |y| / 127. Where s is NaN or 0, q is zeros. |y / s| never rounds above 127.
template <class Input>
void round_block(const float* y, size_t count, size_t padded, Input* q, float& scale, int32_t& total) {
    Ints most = all(0);
    for (size_t k = 0; k < count; k += lane_count)
        most = greater(most, magnitude(load(y + k, count - k)));
    scale = scale_for(most, 127.0f);
    total = 0;
    if (!(scale > 0.0f)) {
        memset(q, 0, padded * sizeof(Input));
        return;
    }
    const Floats inverse = all(1.0f / scale);
    Ints totals = all(0);
    size_t k = 0;
    for (; k < count; k += lane_count) {
        const Ints whole = to_ints(round_even(load(y + k, count - k) * inverse));
        totals = totals + whole;
        narrow(q + k, whole);
    }
    if (k < padded)
        memset(q + k, 0, (padded - k) * sizeof(Input));
    total = sum(totals);
}

// Return what a product reads of x: x itself, or y, where something is done to it.
inline const float* prologue(const Layer& layer, const float* x, float* y) {
    if (layer.activation != Activation::none || layer.gated) {
        activate(layer, x, y);
        x = y;
    }
    if (layer.norm != Norm::none) {
        normalise(layer, x, y);
        x = y;
    }
    if (layer.mixed) {
        mix(layer, x, y);
        x = y;
    }
    return x;
}

// Product::prepare of integers.
template <class P>
void prepare(const Layer& layer, const float* x, float* y, const RoundedRows& rows, size_t m) {
    x = prologue(layer, x, y);
    auto* const q = static_cast<typename P::Input*>(rows.values) + m * layer.padded_inputs;
    for (size_t b = 0; b < layer.blocks; ++b) {
        const size_t start = b * layer.block, at = m * layer.blocks + b;
        round_block(x + start, lesser(layer.block, layer.inputs - start), lesser(layer.block, layer.padded_inputs - start),
                    q + start, rows.scales[at], rows.excess[at]);
        rows.excess[at] *= P::zero_point;
    }
}

// Product::prepare of floats, which stay as they are.
inline void prepare_floats(const Layer& layer, const float* x, float* y, const RoundedRows& rows, size_t m) {
    float* const to = static_cast<float*>(rows.values) + m * layer.padded_inputs;
    memcpy(to, prologue(layer, x, y), layer.inputs * sizeof(float));
}
