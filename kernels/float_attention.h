// Attention over keys and values of floats. Of 16 positions, from a multiple of 16 on, the keys are [D][16] and the values
// [16][D], so that both products go through them in order: scores by elements, values by positions. Plain keys are [16][D],
// and are turned when they are read.

// Write a token's key or value to a plain cache: of int8 to the nearest integer from -127 to 127, and NaN to -127.
inline void append_plain(const Caches& caches, uint8_t* cache, size_t at, const float* x, size_t size) {
    if (!caches.narrow)
        return void(memcpy(reinterpret_cast<float*>(cache) + at, x, size * sizeof(float)));
    const Floats least = all(-127.0f), most = all(127.0f);
    for (size_t d = 0; d < size; d += lane_count) {
        const Floats cut = greater(least, load(x + d));
        narrow(reinterpret_cast<int8_t*>(cache) + at + d, to_ints(round_even(if_less(most, cut, most, cut))));
    }
}

// Attention::append.
inline void append_floats(const Heads& heads, const Caches& caches, const float* x, const Stretch& stretch, size_t token,
                          size_t tokens, const RoundedRows& queries) {
    const size_t size = heads.size, group = heads.group();
    const size_t position = stretch.position + token - stretch.token;
    float y[most_head_size];
    for (size_t kv_head = 0; kv_head < heads.kv_count; ++kv_head)
        for (size_t i = 0; i < group; ++i, x += size) {
            const size_t at = (kv_head * tokens + token) * group + i;
            memcpy(static_cast<float*>(queries.values) + at * size, turned(heads, x, position, y), size * sizeof(float));
        }
    if (heads.reads_only)
        return;
    for (size_t head = 0; head < heads.kv_count; ++head, x += size) {
        const size_t place = stretch.place(heads, caches, head, position);
        const float* const key = turned(heads, x, position, y);
        if (caches.plain) {
            append_plain(caches, caches.keys, place * size, key, size);
            continue;
        }
        float* const to = reinterpret_cast<float*>(caches.keys) + place / lane_count * lane_count * size + place % lane_count;
        for (size_t d = 0; d < size; ++d)
            to[d * lane_count] = key[d];
    }
    for (size_t head = 0; head < heads.kv_count; ++head, x += size) {
        const size_t place = stretch.place(heads, caches, head, position);
        append_plain(caches, caches.values, place * size, x, size);
    }
}

// Bring the keys of the first positions, at most 16, from [16][D] to [D][16]: four elements of four positions trade places.
inline void turn_keys(const float* keys, size_t count, size_t size, float* to) {
    using Four = float __attribute__((vector_size(16)));
    for (size_t t = 0; t < lane_count; t += 4)
        for (size_t d = 0; d < size; d += 4) {
            Four row[4];
            for (size_t i = 0; i < 4; ++i)
                memcpy(&row[i], keys + lesser(t + i, count - 1) * size + d, sizeof row[i]);
            const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
            const Four b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
            const Four c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
            const Four e = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
            const Four column[4] = {
                __builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                __builtin_shufflevector(c, e, 0, 1, 4, 5), __builtin_shufflevector(c, e, 2, 3, 6, 7)};
            for (size_t i = 0; i < 4; ++i)
                memcpy(to + (d + i) * lane_count + t, &column[i], sizeof column[i]);
        }
}

// R queries of a stretch, and a section of the positions.
template <int R>
class FloatTile : Scores<R> {
public:
    FloatTile(const Heads& heads, const Caches& caches, const Stretch& stretch, size_t kv_head, size_t from,
              const RoundedRows& queries, size_t query)
        : Scores<R>(heads, stretch, kv_head, from, query), caches(caches), stretch(stretch), kv_head(kv_head) {
        q = static_cast<const float*>(queries.values) + query * heads.size;
    }

    void attend(const Softmax& softmax) {
        if (start >= stop)
            return;
        for (size_t t = start; t < stop; t += lane_count)
            score(t);
        for (int r = 0; r < R; ++r)
            soften(r, softmax);
        if (caches.narrow)
            widened_values = widened(caches.values, start, end[R - 1] - start);
        // What a query does not attend to is not multiplied by 0: it may be NaN.
        const size_t shared_begin = begin[R - 1], shared_end = end[0];
        const bool is_shared = R > 1 && shared_begin < shared_end;
        for (int r = 0; r < R; ++r) {
            memset(sums[r], 0, heads.size * sizeof(float));
            weigh<1>(r, begin[r], is_shared ? shared_begin : end[r]);
        }
        if (is_shared) {
            weigh<R>(0, shared_begin, shared_end);
            for (int r = 0; r < R; ++r)
                weigh<1>(r, shared_end, end[r]);
        }
        for (int r = 0; r < R; ++r)
            for (size_t d = 0; sees(r) && d < heads.size; d += lane_count) {
                float* const to = softmax.values + at[r] * heads.size + d;
                store(to, fma(load(to), factors[r].sum, load(sums[r] + d) * factors[r].added));
            }
    }

private:
    using Scores<R>::at, Scores<R>::begin, Scores<R>::end, Scores<R>::factors, Scores<R>::heads, Scores<R>::most;
    using Scores<R>::scores, Scores<R>::sees, Scores<R>::start, Scores<R>::stop, Scores<R>::take;

    // The first number of 16 positions' keys or values.
    const float* group_at(const uint8_t* cache, size_t t) const {
        return reinterpret_cast<const float*>(cache) + stretch.place(heads, caches, kv_head, t) * heads.size;
    }

    // Plain keys or values of positions from t on, as floats.
    const float* widened(const uint8_t* cache, size_t t, size_t count) const {
        if (!caches.narrow)
            return group_at(cache, t);
        const auto* const from = reinterpret_cast<const int8_t*>(cache) + stretch.place(heads, caches, kv_head, t) * heads.size;
        auto* const to = reinterpret_cast<float*>(section_room(heads.size * sizeof(float)));
        for (size_t i = 0; i < count * heads.size; ++i)
            to[i] = float(from[i]);
        return to;
    }

    // Compute the scores of 16 positions from t on, which are a group.
    void score(size_t t) {
        const float* keys = turned_keys;
        if (caches.plain) {
            const size_t count = lesser(lane_count, caches.block_tokens - t);
            turn_keys(widened(caches.keys, t, count), count, heads.size, turned_keys);
        } else {
            keys = group_at(caches.keys, t);
        }
        Floats total[R];
        unrolled<R>([&](auto r) { total[r] = all(0.0f); });
        for (size_t d = 0; d < heads.size; ++d) {
            const Floats key = load(keys + d * lane_count);
            unrolled<R>([&](auto r) { total[r] = fma(all(q[r * heads.size + d]), key, total[r]); });
        }
        unrolled<R>([&](auto r) { take(r, t, total[r] * all(heads.scale)); });
    }

    // Turn scores into powers, whose sum goes into the softmax.
    void soften(int r, const Softmax& softmax) {
        const float largest = greatest(most[r]);
        const Floats base = base_of(largest);
        Floats denominator = all(0.0f);
        for (size_t i = 0; i < stop - start; i += lane_count) {
            const Floats power = exp2_or_zero(load(scores[r] + i) - base);
            denominator = denominator + power;
            store(scores[r] + i, power);
        }
        if (sees(r))
            factors[r] = join(softmax, at[r], largest, sum(denominator));
    }

    // Add the values of positions [first, last), times their powers, to the sums of N queries from a number on.
    template <int N>
    void weigh(int query, size_t first, size_t last) {
        for (size_t d = 0; d < heads.size; d += lane_count) {
            Floats total[N];
            unrolled<N>([&](auto r) { total[r] = load(sums[query + r] + d); });
            for (size_t t = first, next; t < last; t = next) {
                next = lesser(last, t / lane_count * lane_count + lane_count);
                const float* value =
                    (widened_values ? widened_values + (t - start) * heads.size : group_at(caches.values, t)) + d;
                for (size_t i = t - start; i < next - start; ++i, value += heads.size) {
                    const Floats of_position = load(value);
                    unrolled<N>([&](auto r) { total[r] = fma(all(scores[query + r][i]), of_position, total[r]); });
                }
            }
            unrolled<N>([&](auto r) { store(sums[query + r] + d, total[r]); });
        }
    }

    const Caches& caches;
    const Stretch& stretch;
    const size_t kv_head;
    const float* q;  // [R][D]
    const float* widened_values = nullptr;  // of the section, where they are int8
    alignas(64) float sums[R][most_head_size];
    alignas(64) float turned_keys[most_head_size * lane_count];
};

// Attend with R queries at a time; with what is left, half as many at a time.
template <int R>
void attend_float_tiles(const Heads& heads, const Caches& caches, const Stretch& stretch, size_t kv_head, size_t section,
                        const RoundedRows& queries, size_t query, const Softmax& softmax) {
    for (; query + R <= stretch.count * heads.group(); query += R)
        FloatTile<R>(heads, caches, stretch, kv_head, section * section_tokens, queries, query).attend(softmax);
    if constexpr (R > 1)
        attend_float_tiles<R / 2>(heads, caches, stretch, kv_head, section, queries, query, softmax);
}

// Attention::attend.
template <int R>
void attend_floats(const Heads& heads, const Caches& caches, const Stretch& stretch, size_t kv_head, size_t section,
                   const RoundedRows& queries, const Softmax& softmax) {
    attend_float_tiles<R>(heads, caches, stretch, kv_head, section, queries, 0, softmax);
}

template <int R>
constexpr Attention float_attention() {
    return {sizeof(float), append_floats, attend_floats<R>, join};
}
