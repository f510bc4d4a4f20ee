// Attention over keys and values of 8 bits, written once over the lanes and the product of a path.

// Probabilities have 15 bits. Where a product takes int8 they are two rows, 256 * high + low, both signed.
constexpr float most_probability = 127 * 256 + 127;

template <class P>
constexpr int planes = sizeof(typename P::Input) == 1 ? 2 : 1;

constexpr float infinity = __builtin_inff();

// The numbers of 16 positions.
inline Floats lanes_from(size_t position) {
    static constexpr float lanes[lane_count] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return all(float(position)) + load(lanes);
}

// Scores are in bits, so that a softmax takes powers of two. Those this far below the largest one count nothing.
constexpr float least_score = -125.0f;

// 2 to the power of each lane, of lanes from least_score to 0, within 2 ulp; NaN stays NaN. The polynomial of degree 5 was
// fitted to the least relative error, 1 at 0.
inline Floats exp2(Floats x) {
    const Floats n = round_even(x), r = x - n;
    Floats p = all(1.3264726149e-3f);
    p = fma(p, r, all(9.6715129912e-3f));
    p = fma(p, r, all(5.5507335812e-2f));
    p = fma(p, r, all(2.4022242427e-1f));
    p = fma(p, r, all(6.9314700365e-1f));
    return scaled(fma(p, r, all(1.0f)), n);
}

inline Floats exp2_or_zero(Floats x) {
    const Floats least = all(least_score);
    return if_less(x, least, all(0.0f), exp2(greater(x, least)));
}

// What is subtracted from scores, of which this is the largest: -infinity remains.
inline Floats base_of(float largest) { return all(largest == -infinity ? 0.0f : largest); }

// The factors that bring two sums of powers to the larger one of their largest scores.
struct Factors {
    Floats sum, added;

    Factors() = default;
    Factors(float sum_most, float added_most) {
        const Floats one = all(1.0f), a = all(sum_most), b = all(added_most);
        const Floats decay = exp2_or_zero(if_less(a, b, a - b, b - a));
        sum = if_less(a, b, decay, one);
        added = if_less(a, b, one, decay);
    }
};

// Add a section to a softmax, but for its values. One whose scores all are -infinity adds nothing.
inline Factors join(const Softmax& softmax, size_t at, float most, float denominator) {
    const Factors factors(most == -infinity ? 0.0f : softmax.most[at], most);
    softmax.most[at] = most > softmax.most[at] ? most : softmax.most[at];
    store(softmax.denominator + at, fma(all(softmax.denominator[at]), factors.sum, all(denominator) * factors.added), 1);
    return factors;
}

// Turn the rotary pairs of x [size] into y by the angles of a position.
inline void rotate(const Heads& heads, const float* x, size_t position, float* y) {
    const size_t half = heads.rotated / 2;
    const size_t step = heads.interleaved ? 2 : 1, away = heads.interleaved ? 1 : half;
    float first[most_head_size / 2], second[most_head_size / 2];
    for (size_t i = 0; i < half; ++i) {
        first[i] = x[i * step];
        second[i] = x[i * step + away];
    }
    for (size_t i = 0; i < half; i += lane_count) {
        const Floats cos = load(heads.cos + position * half + i, half - i);
        const Floats sin = load(heads.sin + position * half + i, half - i);
        const Floats a = load(first + i, half - i), b = load(second + i, half - i);
        store(first + i, fma(a, cos, negated(b * sin)), half - i);
        store(second + i, fma(b, cos, a * sin), half - i);
    }
    for (size_t i = 0; i < half; ++i) {
        y[i * step] = first[i];
        y[i * step + away] = second[i];
    }
    memcpy(y + heads.rotated, x + heads.rotated, (heads.size - heads.rotated) * sizeof(float));
}

// x, or y, to which it is turned.
inline const float* turned(const Heads& heads, const float* x, size_t position, float* y) {
    if (!heads.rotated)
        return x;
    rotate(heads, x, position, y);
    return y;
}

// Attention::append.
template <class P>
void append(const Heads& heads, const Caches& caches, const float* x, const Stretch& stretch, size_t token, size_t tokens,
            const RoundedRows& queries) {
    using Input = typename P::Input;
    const size_t size = heads.size, group = heads.group();
    const size_t position = stretch.position + token - stretch.token;
    float y[most_head_size];
    uint8_t bytes[most_head_size];
    const auto round = [&](const float* from, float& scale) {
        int32_t total;
        round_block(from, size, size, reinterpret_cast<int8_t*>(bytes), scale, total);
        for (size_t d = 0; d < size; ++d)
            bytes[d] ^= 128;
    };
    for (size_t kv_head = 0; kv_head < heads.kv_count; ++kv_head)
        for (size_t i = 0; i < group; ++i, x += size) {
            const size_t at = (kv_head * tokens + token) * group + i;
            round_block(turned(heads, x, position, y), size, size, static_cast<Input*>(queries.values) + at * size,
                        queries.scales[at], queries.excess[at]);
            queries.excess[at] *= P::zero_point;
        }
    for (size_t head = 0; head < heads.kv_count; ++head, x += size) {
        const size_t place = stretch.place(heads, caches, head, position);
        round(turned(heads, x, position, y), caches.key_scales[place]);
        uint8_t* const to = caches.keys + place / 16 * 16 * size + place % 16 * 4;
        for (size_t d = 0; d < size; d += 4)
            memcpy(to + d * 16, bytes + d, 4);
    }
    for (size_t head = 0; head < heads.kv_count && !heads.shared; ++head, x += size) {
        const size_t place = stretch.place(heads, caches, head, position);
        round(x, caches.value_scales[place]);
        uint8_t* const to = caches.values + place / 4 * 4 * size + place % 4;
        for (size_t d = 0; d < size; ++d)
            to[d * 4] = bytes[d];
    }
}

// The places in caches of a section's positions, for one key/value head. A group of 16 positions lies in one block.
struct Places {
    static constexpr size_t groups = section_tokens / lane_count;

    Places(const Heads& heads, const Caches& caches, const Stretch& stretch, size_t kv_head, size_t section) {
        const size_t from = section * section_tokens;
        const size_t end = heads.end_seen(stretch.position + stretch.count - 1, stretch.length);
        const size_t last = (end - 1) / lane_count * lane_count;
        uint8_t* const turned_keys = heads.shared ? section_room(heads.size) : nullptr;
        for (size_t i = 0; i < groups + spare; ++i) {
            const size_t position = lesser(from + i * lane_count, last);
            const bool is_new = i == 0 || (i < groups && position == from + i * lane_count);
            token[i] = is_new ? stretch.place(heads, caches, kv_head, position) : token[i - 1];
            byte[i] = token[i] * heads.size;
            value_byte[i] = heads.shared ? lesser(position - from, section_tokens - lane_count) * heads.size : byte[i];
            if (heads.shared && is_new)
                reorder(caches.keys + byte[i], heads.size, turned_keys + value_byte[i]);
        }
        values = heads.shared ? turned_keys : caches.values;
    }

    static constexpr size_t spare = 2;  // for prefetching
    size_t token[groups + spare];
    size_t byte[groups + spare];
    const uint8_t* values;
    size_t value_byte[groups + spare];

    // Bring a group of keys into the order of values: four elements of four positions trade places.
    static void reorder(const uint8_t* keys, size_t size, uint8_t* to) {
        using Square = uint8_t __attribute__((vector_size(16)));
        for (size_t d = 0; d < size; d += 4)
            for (size_t t = 0; t < lane_count; t += 4) {
                Square square;
                memcpy(&square, keys + d * lane_count + t * 4, sizeof square);
                square = __builtin_shufflevector(square, square, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                memcpy(to + t * size + d * 4, &square, sizeof square);
            }
    }
};

// Where products find the keys of groups: a panel has 16 positions, its inputs are elements.
template <class P>
struct KeyGroups {
    static constexpr bool adds_128 = P::zero_point == 0;
    const uint8_t* data;
    const size_t* byte;

    const uint8_t* at(int p, size_t k) const { return data + byte[p] + k * lane_count; }
    const uint8_t* next(int p, size_t k) const { return at(p + P::panels, k); }
};

// And values: a panel has 16 elements, its inputs are positions.
template <class P>
struct ValueGroups {
    static constexpr bool adds_128 = P::zero_point == 0;
    const uint8_t* data;
    const size_t* byte;
    size_t size;

    const uint8_t* at(int p, size_t k) const {
        return data + byte[k / lane_count] + k % lane_count * size + p * 4 * lane_count;
    }
    const uint8_t* next(int p, size_t k) const { return at(p, k + lane_count); }
};

// P::multiply for any number of rows.
template <class P, int rows, int panels, class Weights, int done = 0>
void multiply_all(const typename P::Input* q, size_t stride, const Weights& weights, size_t count, Ints (&sums)[rows][panels]) {
    constexpr int some = rows - done < P::rows ? rows - done : P::rows;
    P::multiply(q + done * stride, stride, weights, count, reinterpret_cast<Ints(&)[some][panels]>(sums[done]));
    if constexpr (done + some < rows)
        multiply_all<P, rows, panels, Weights, done + some>(q, stride, weights, count, sums);
}

// The scores of R queries of a stretch in a section of the positions.
template <int R>
class Scores {
protected:
    Scores(const Heads& heads, const Stretch& stretch, size_t kv_head, size_t from, size_t query) : heads(heads), from(from) {
        for (int r = 0; r < R; ++r) {
            const size_t token = (query + r) / heads.group(), head = kv_head * heads.group() + (query + r) % heads.group();
            position[r] = stretch.position + token;
            at[r] = (stretch.token + token) * heads.count + head;
            slope[r] = heads.slopes ? heads.slopes[head] * log2_e : 0.0f;
            bias[r] = nullptr;
            if (stretch.biases)
                bias[r] = stretch.biases + (head * heads.bias_rows + stretch.bias_row + token) * heads.bias_width;
            end[r] = lesser(heads.end_seen(position[r], stretch.length), from + section_tokens);
            begin[r] = heads.first_seen(position[r]);
            begin[r] = begin[r] < from ? from : begin[r];
            most[r] = all(-infinity);
        }
        // Later queries begin and end later.
        start = begin[0] / lane_count * lane_count;
        group = (start - from) / lane_count;
        stop = (end[R - 1] + lane_count - 1) / lane_count * lane_count;
    }

    bool sees(int r) const { return begin[r] < end[r]; }

    // Take a query's scores of 16 positions from t on; those of positions that it does not attend to are -infinity.
    void take(int r, size_t t, Floats value) {
        if (heads.softcap != 0.0f)
            value = all(heads.softcap * log2_e) * tanh(value * all(1.0f / heads.softcap));
        if (heads.slopes)
            value = fma(all(slope[r]), lanes_from(t) - all(float(position[r])), value);
        if (bias[r])
            value = fma(load(bias[r] + t, heads.bias_width - t), all(log2_e), value);
        if (t < begin[r] || t + lane_count > end[r]) {
            const Floats least = all(-infinity);
            value = if_less(lanes_from(t), all(float(end[r])), value, least);
            value = if_less(lanes_from(t), all(float(begin[r])), least, value);
        }
        most[r] = greater(most[r], value);
        store(scores[r] + t - start, value);
    }

    const Heads& heads;
    const size_t from;   // the first position of the section
    size_t start, stop;  // whole groups of positions that any query attends to
    size_t group;        // the first of them

    // Of each query:
    size_t position[R], at[R], begin[R], end[R];
    const float* bias[R];
    float slope[R];
    Floats most[R];
    Factors factors[R];
    alignas(64) float scores[R][section_tokens];
};

// The same over keys and values of 8 bits.
template <class P, int R>
class Tile : Scores<R> {
public:
    Tile(const Heads& heads, const Caches& caches, const Places& places, const Stretch& stretch, size_t kv_head, size_t from,
         const RoundedRows& queries, size_t query)
        : Scores<R>(heads, stretch, kv_head, from, query), caches(caches), places(places) {
        q = static_cast<const Input*>(queries.values) + query * heads.size;
        for (int r = 0; r < R; ++r) {
            factor[r] = queries.scales[query + r] * heads.scale;
            excess[r] = queries.excess[query + r];
        }
    }

    void attend(const Softmax& softmax) {
        if (start >= stop)
            return;
        size_t t = start;
        for (; t + P::panels * lane_count <= stop; t += P::panels * lane_count)
            score<P::panels>(t);
        if (t < stop)
            score<1>(t);
        for (int r = 0; r < R; ++r)
            soften(r, softmax);
        size_t d = 0;
        for (; d + P::panels * lane_count <= heads.size; d += P::panels * lane_count)
            weigh<P::panels>(d, softmax);
        if (d < heads.size)
            weigh<1>(d, softmax);
    }

private:
    using Input = typename P::Input;
    static_assert(P::panels <= 2);
    using Scores<R>::at, Scores<R>::factors, Scores<R>::from, Scores<R>::group, Scores<R>::heads, Scores<R>::most;
    using Scores<R>::scores, Scores<R>::sees, Scores<R>::start, Scores<R>::stop, Scores<R>::take;

    // Compute scores from a position on.
    template <int panels>
    void score(size_t t) {
        Ints whole[R][panels];
        const size_t i = (t - from) / lane_count;
        multiply_all<P>(q, heads.size, KeyGroups<P>{caches.keys, places.byte + i}, heads.size, whole);
        for (int p = 0; p < panels; ++p, t += lane_count) {
            const Floats scale = load(caches.key_scales + places.token[i + p]);
            for (int r = 0; r < R; ++r)
                take(r, t, to_floats(whole[r][p] - all(excess[r])) * (scale * all(factor[r])));
        }
    }

    // Turn scores into probabilities, times the scale of the value and rounded.
    void soften(int r, const Softmax& softmax) {
        const float largest = greatest(most[r]);
        const Floats base = base_of(largest);
        const size_t count = stop - start;
        Floats denominator = all(0.0f);
        Ints bits = all(0);
        for (size_t i = 0; i < count; i += lane_count) {
            const Floats x = load(scores[r] + i) - base;
            const Floats power = exp2_or_zero(x);
            denominator = denominator + power;
            // Where nothing was written the scale may be anything.
            const Floats scale = load(caches.value_scales + places.token[group + i / lane_count]);
            const Floats weight = if_less(x, all(least_score), all(0.0f), power * scale);
            bits = greater(bits, magnitude(weight));
            store(scores[r] + i, weight);
        }
        steps[r] = scale_for(bits, most_probability);
        Input* const to = probabilities[r * planes<P>];
        int32_t* const total = excess_probabilities + r * planes<P>;
        if (!sees(r) || !(steps[r] > 0.0f)) {
            memset(to, 0, sizeof(probabilities[0]) * planes<P>);
            memset(total, 0, sizeof(int32_t) * planes<P>);
        } else {
            const Floats inverse = all(1.0f / steps[r]);
            Ints totals[planes<P>];
            for (Ints& one : totals)
                one = all(0);
            for (size_t i = 0; i < count; i += lane_count) {
                const Ints probability = round_to_ints(load(scores[r] + i) * inverse);
                narrow(to + i, probability);
                totals[0] = totals[0] + probability;
                if constexpr (planes<P> == 2) {
                    const Ints high = high_bytes(probability);
                    narrow(to + section_tokens + i, high);
                    totals[1] = totals[1] + high;
                }
            }
            total[0] = P::zero_point * sum(totals[0]);
            if constexpr (planes<P> == 2) {
                total[1] = P::zero_point * sum(totals[1]);
                total[0] -= 256 * total[1];
            }
        }
        if (sees(r))
            factors[r] = join(softmax, at[r], largest, sum(denominator));
    }

    // Add the sums of values of elements from d on.
    template <int panels>
    void weigh(size_t d, const Softmax& softmax) {
        Ints whole[R * planes<P>][panels];
        const ValueGroups<P> values{places.values + d * 4, places.value_byte + group, heads.size};
        multiply_all<P>(probabilities[0], section_tokens, values, stop - start, whole);
        for (int r = 0; r < R; ++r) {
            if (!sees(r))
                continue;
            for (int p = 0; p < panels; ++p) {
                const int low = r * planes<P>, high = low + planes<P> - 1;
                Floats value = to_floats(whole[low][p] - all(excess_probabilities[low]));
                // Both are below 2^24, so this rounds their sum once, as one conversion does.
                if (planes<P> == 2)
                    value = fma(to_floats(whole[high][p] - all(excess_probabilities[high])), all(256.0f), value);
                float* const to = softmax.values + at[r] * heads.size + d + p * lane_count;
                store(to, fma(load(to), factors[r].sum, value * all(steps[r]) * factors[r].added));
            }
        }
    }

    const Caches& caches;
    const Places& places;
    const Input* q;  // [R][D]

    // Of each query:
    float factor[R], steps[R];
    int32_t excess[R], excess_probabilities[R * planes<P>];
    alignas(64) Input probabilities[R * planes<P>][section_tokens];
};

// Attend with R queries at a time; with what is left, R - 1 at a time.
template <class P, int R>
void attend_tiles(const Heads& heads, const Caches& caches, const Places& places, const Stretch& stretch, size_t kv_head,
                  size_t section, const RoundedRows& queries, size_t query, const Softmax& softmax) {
    for (; query + R <= stretch.count * heads.group(); query += R)
        Tile<P, R>(heads, caches, places, stretch, kv_head, section * section_tokens, queries, query).attend(softmax);
    if constexpr (R > 1)
        attend_tiles<P, R - 1>(heads, caches, places, stretch, kv_head, section, queries, query, softmax);
}

// Attention::attend.
template <class P>
void attend(const Heads& heads, const Caches& caches, const Stretch& stretch, size_t kv_head, size_t section,
            const RoundedRows& queries, const Softmax& softmax) {
    const Places places(heads, caches, stretch, kv_head, section);
    attend_tiles<P, P::rows>(heads, caches, places, stretch, kv_head, section, queries, 0, softmax);
}

// Attention::join.
inline void join(const Heads& heads, const Stretch& stretch, size_t kv_head, const Softmax& section, const Softmax& softmax) {
    for (size_t token = stretch.token; token < stretch.token + stretch.count; ++token)
        for (size_t i = 0; i < heads.group(); ++i) {
            const size_t at = token * heads.count + kv_head * heads.group() + i;
            if (section.denominator[at] == 0.0f)
                continue;  // it attends to nothing there
            const Factors factors = join(softmax, at, section.most[at], section.denominator[at]);
            for (size_t d = at * heads.size; d < (at + 1) * heads.size; d += lane_count)
                store(softmax.values + d,
                      fma(load(softmax.values + d), factors.sum, load(section.values + d) * factors.added));
        }
}

template <class P>
constexpr Attention attention() {
    return {sizeof(typename P::Input), append<P>, attend<P>, join};
}
