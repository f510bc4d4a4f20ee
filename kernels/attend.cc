#include "attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"

namespace kvasir {

namespace {

// Below these a task costs more than it saves.
constexpr size_t fewest_parallel_inputs = 1 << 14;
constexpr size_t fewest_parallel_products = 1 << 18;
// Fewer tasks than these are divided by sections, so that all threads have work.
constexpr size_t fewest_tasks = 8;

// The sections that a stretch attends to.
struct Sections {
    Sections(const Heads& heads, const Stretch& stretch) {
        start = heads.first_seen(stretch.position);
        end = heads.end_seen(stretch.position + stretch.count - 1, stretch.length);
        first = start / section_tokens;
        last = (end - 1) / section_tokens + 1;
    }

    size_t start, end, first, last;
};

template <class Work>
void run_tasks(const Run& run, bool is_parallel, size_t tasks, Work work) {
    if (is_parallel)
        return run.in_parallel(tasks, work, tasks);
    for (size_t task = 0; task < tasks; ++task)
        work(task);
}

// Call body(index of the query, its head) for the queries of a stretch that share a key/value head.
template <class Body>
void each_query(const Heads& heads, const Stretch& stretch, size_t kv_head, Body body) {
    for (size_t token = stretch.token; token < stretch.token + stretch.count; ++token)
        for (size_t head = kv_head * heads.group(); head < (kv_head + 1) * heads.group(); ++head)
            body(token * heads.count + head, head);
}

// An empty softmax; or one of the sink alone, whose value is 0.
void begin(const Heads& heads, const Stretch& stretch, size_t kv_head, const Softmax& softmax, bool has_sink) {
    has_sink = has_sink && heads.sinks;
    each_query(heads, stretch, kv_head, [&](size_t query, size_t head) {
        softmax.most[query] = has_sink ? heads.sinks[head] * log2_e : -INFINITY;
        softmax.denominator[query] = has_sink ? 1.0f : 0.0f;
        memset(softmax.values + query * heads.size, 0, heads.size * sizeof(float));
    });
}

void finish(const Heads& heads, const Stretch& stretch, size_t kv_head, const Softmax& softmax) {
    each_query(heads, stretch, kv_head, [&](size_t query, size_t) {
        const float inverse = 1.0f / softmax.denominator[query];
        for (size_t d = query * heads.size; d < (query + 1) * heads.size; ++d)
            softmax.values[d] *= inverse;
    });
}

}  // namespace

void attend(const Run& run, const Attention& attention, const Heads& heads, const Caches& caches,
            const std::vector<Stretch>& stretches, size_t tokens, const float* from, float* out) {
    size_t products = 0, first_section = most_tokens, last_section = 0;
    for (const Stretch& stretch : stretches) {
        const Sections sections(heads, stretch);
        products += 3 * heads.count * heads.size * stretch.count * (sections.end - sections.start);
        first_section = std::min(first_section, sections.first);
        last_section = std::max(last_section, sections.last);
    }
    const size_t tasks = stretches.size() * heads.kv_count;
    const bool is_parallel = products >= fewest_parallel_products;
    const bool is_divided = is_parallel && tasks < fewest_tasks && last_section - first_section > 1;
    const size_t section_count = is_divided ? last_section - first_section : 0;

    const size_t queries = tokens * heads.count;
    const size_t query_bytes = round_up(queries * heads.size * attention.input_bytes, sizeof(CacheLine));
    const size_t number_bytes = round_up(queries * sizeof(float), sizeof(CacheLine));
    const size_t softmax_bytes = 2 * number_bytes, values_bytes = queries * heads.size * sizeof(float);
    // A thread computes one operator at a time, and the largest room serves them all.
    thread_local Lines room;
    const size_t bytes = query_bytes + 2 * number_bytes + softmax_bytes + section_count * (softmax_bytes + values_bytes);
    if (room.size() * sizeof(CacheLine) < bytes)
        room = lines_of(bytes);
    unsigned char* at = room.data()->bytes;
    const auto take = [&](size_t count) {
        unsigned char* const taken = at;
        at += count;
        return taken;
    };
    const auto take_floats = [&](size_t count) { return reinterpret_cast<float*>(take(count)); };
    void* const rounded = take(query_bytes);
    float* const scales = take_floats(number_bytes);
    const RoundedRows all_queries{rounded, scales, reinterpret_cast<int32_t*>(take(number_bytes))};
    float* const most = take_floats(number_bytes);
    const Softmax whole{most, take_floats(number_bytes), out};
    std::vector<Softmax> divided(section_count);
    for (Softmax& section : divided) {
        section.most = take_floats(number_bytes);
        section.denominator = take_floats(number_bytes);
        section.values = take_floats(values_bytes);
    }

    // All of a run are appended before the first is read, so the tokens of a prompt see each other.
    const auto append = [&](size_t task) {
        const Stretch& stretch = stretches[task];
        for (size_t token = stretch.token; token < stretch.token + stretch.count; ++token)
            attention.append(heads, caches, from + token * heads.row_width(), stretch, token, tokens, all_queries);
    };
    run_tasks(run, tokens * heads.row_width() >= fewest_parallel_inputs, stretches.size(), append);

    const auto queries_of = [&](const Stretch& stretch, size_t kv_head) {
        const size_t first = (kv_head * tokens + stretch.token) * heads.group();
        return RoundedRows{static_cast<unsigned char*>(rounded) + first * heads.size * attention.input_bytes,
                           all_queries.scales + first, all_queries.excess + first};
    };
    if (!is_divided)
        return run_tasks(run, is_parallel, tasks, [&](size_t task) {
            // Late stretches are the longest, so they come first.
            const Stretch& stretch = stretches[stretches.size() - 1 - task / heads.kv_count];
            const size_t kv_head = task % heads.kv_count;
            begin(heads, stretch, kv_head, whole, true);
            const Sections sections(heads, stretch);
            for (size_t section = sections.first; section < sections.last; ++section)
                attention.attend(heads, caches, stretch, kv_head, section, queries_of(stretch, kv_head), whole);
            finish(heads, stretch, kv_head, whole);
        });
    run_tasks(run, true, tasks * section_count, [&](size_t task) {
        const Stretch& stretch = stretches[task % tasks / heads.kv_count];
        const size_t kv_head = task % heads.kv_count;
        begin(heads, stretch, kv_head, divided[task / tasks], false);
        attention.attend(heads, caches, stretch, kv_head, first_section + task / tasks, queries_of(stretch, kv_head),
                         divided[task / tasks]);
    });
    for (size_t task = 0; task < tasks; ++task) {
        const Stretch& stretch = stretches[task / heads.kv_count];
        const size_t kv_head = task % heads.kv_count;
        begin(heads, stretch, kv_head, whole, true);
        for (const Softmax& section : divided)
            attention.join(heads, stretch, kv_head, section, whole);
        finish(heads, stretch, kv_head, whole);
    }
}

}  // namespace kvasir
