// Recurrent layers, token after token: a sum's order is that of taps or of chains of keys, whatever tokens are beside it.

// Path::convolve.
inline void convolve(const Convolution& layer, const float* past, const float* x, size_t tokens, size_t channel, float* y) {
    const size_t before = layer.kernel - 1, count = layer.channels - channel;
    for (size_t t = 0; t < tokens; ++t) {
        Floats total = layer.bias ? load(layer.bias + channel) : all(0.0f);
        for (size_t tap = t; tap < t + layer.kernel; ++tap) {
            const float* const token = tap < before ? past + tap * layer.channels : x + (tap - before) * layer.channels;
            const Floats weight = load(layer.weights + (tap - t) * layer.padded_channels + channel);
            total = fma(weight, load(token + channel, count), total);
        }
        store(y + t * layer.channels + channel, layer.silu ? silu(total) : total, count);
    }
}

// The sum over keys of a number times a row, of row(k) [16]: chain c takes keys c, c + 4, …; then chains 0 and 2 are
// added, 1 and 3, and both.
template <class Row>
inline Floats chained(size_t keys, const float* numbers, const Row& row) {
    Floats sums[chains];
    unrolled<chains>([&](auto chain) { sums[chain] = all(0.0f); });
    size_t k = 0;
    for (; k + chains <= keys; k += chains)
        unrolled<chains>([&](auto chain) { sums[chain] = fma(all(numbers[k + chain]), row(k + chain), sums[chain]); });
    unrolled<chains>([&](auto chain) {
        if (k + chain < keys)
            sums[chain] = fma(all(numbers[k + chain]), row(k + chain), sums[chain]);
    });
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Path::remember. The columns are copied, moved by all tokens, and copied back.
[[gnu::flatten]] inline void remember(const Memory& layer, const Told& told, size_t tokens, size_t head, size_t column,
                                      float* matrix, float* read) {
    float rows[most_keys * lane_count], decays[most_keys], decayed_key[most_keys];
    const size_t keys = layer.keys, values = layer.values, count = values - column;
    for (size_t k = 0; k < keys; ++k)
        store(rows + k * lane_count, load(matrix + k * values + column, count));
    for (size_t t = 0; t < tokens; ++t) {
        const size_t token = t * layer.heads + head, at = token * values + column;
        const float *const key = told.key + token * keys, *const logarithms = told.decay + token * layer.decays;
        // What the next token tells is far away, often in the same sets of a cache as what this one does.
        const size_t next = t + 1 < tokens ? token + layer.heads : token;
        __builtin_prefetch(told.value + next * values + column);
        for (size_t k = 0; k < keys; k += lane_count) {
            __builtin_prefetch(told.key + next * keys + k);
            __builtin_prefetch(told.query + next * keys + k);
            if (layer.decays > 1)
                __builtin_prefetch(told.decay + next * keys + k);
        }
        const auto row = [&](size_t k) { return load(rows + k * lane_count); };
        // Add to decayed rows what is not known under the key, and read them.
        const auto move = [&](const auto& decayed, Floats known) {
            Floats added = load(told.value + at, count);
            if (told.rate)
                added = all(told.rate[token]) * (added - known);
            const Floats found = chained(keys, told.query + token * keys, [&](size_t k) {
                const Floats moved = fma(all(key[k]), added, decayed(k));
                store(rows + k * lane_count, moved);
                return moved;
            });
            store(read + at, found * all(layer.scale), count);
        };
        if (layer.decays == 1) {
            const Floats decay = vanishing_exp(all(logarithms[0]));
            move([&](size_t k) { return decay * row(k); }, told.rate ? decay * chained(keys, key, row) : all(0.0f));
            continue;
        }
        for (size_t k = 0; k < keys; k += lane_count) {
            const Floats decay = vanishing_exp(load(logarithms + k, keys - k));
            store(decays + k, decay, keys - k);
            store(decayed_key + k, decay * load(key + k, keys - k), keys - k);
        }
        move([&](size_t k) { return all(decays[k]) * row(k); }, told.rate ? chained(keys, decayed_key, row) : all(0.0f));
    }
    for (size_t k = 0; k < keys; ++k)
        store(matrix + k * values + column, load(rows + k * lane_count), count);
}
