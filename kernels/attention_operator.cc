#include "attention_operator.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"
#include "node.h"
#include "run.h"

namespace kvasir {

namespace {

enum Input : size_t {
    qkv, keys, key_scales, values, value_scales, starts, pasts, table, cosines, sines, slopes, sinks, input_count
};
constexpr size_t output_count = 5;

// Below these a task costs more than it saves.
constexpr size_t fewest_parallel_inputs = 1 << 14;
constexpr size_t fewest_parallel_products = 1 << 18;
// Of one task, where there are enough.
constexpr size_t task_tokens = 8, task_queries = 48;
// Fewer tasks than these are divided by sections, so that all threads have work.
constexpr size_t fewest_tasks = 8;

const char* const name = "Attention";

[[noreturn]] void refuse(const std::string& what) { throw Refusal(std::string("kvasir.") + name + ": " + what); }

bool is_int(size_t index) { return index == starts || index == pasts || index == table; }

class AttentionKernel {
public:
    AttentionKernel(const AttentionOperator& op, const Node& node) : runtime(op.runtime), attention(op.attention) {
        const int64_t count = node.integer("heads", 0), kv_count = node.integer("kv_heads", 0);
        if (count < 1 || kv_count < 1 || count % kv_count != 0)
            node.refuse("the attributes heads and kv_heads are " + std::to_string(count) + " and " + std::to_string(kv_count) +
                        "; both have to be at least 1, and heads a multiple of kv_heads");
        fixed.count = size_t(count);
        fixed.kv_count = size_t(kv_count);
        fixed.scale = node.number("scale", 0.0f);
        fixed.softcap = node.number("softcap", 0.0f);
        if (!(fixed.scale >= 0.0f && fixed.softcap >= 0.0f))
            node.refuse("the attributes scale and softcap have to be at least 0");
        const int64_t window = node.integer("window", -1);
        if (window < 1 && window != -1)
            node.refuse("the attribute window is " + std::to_string(window) + "; it has to be at least 1, or -1");
        fixed.window = window == -1 ? most_tokens : size_t(window);
        fixed.interleaved = node.flag("interleaved");
        has_rotation = node.has_input(cosines);
        if (has_rotation != node.has_input(sines))
            node.refuse("the inputs cos and sin have to be there together");
        has_slopes = node.has_input(slopes);
        has_sinks = node.has_input(sinks);
    }

    void compute(const Run& run) const {
        Heads heads = fixed;
        const Tensor inputs = run.input(qkv), given_keys = run.input(keys);
        take_shape(given_keys, heads);
        Shape shape = inputs.shape;
        if (shape.empty() || shape.back() != int64_t(heads.row_width()))
            refuse("qkv is " + describe(inputs) + "; its last dimension has to be " + std::to_string(heads.row_width()));
        const size_t tokens = inputs.count() / heads.row_width();
        shape.back() = int64_t(heads.count * heads.size);
        const size_t angles = take_constants(run, heads);
        const std::vector<Stretch> stretches = cut(run, heads, given_keys.shape, tokens, angles);
        const Caches caches = kept_caches(run, given_keys.shape);
        float* const out = run.output<float>(0, shape);
        if (tokens)
            compute(run, heads, caches, stretches, tokens, inputs.floats(), out);
    }

    const Runtime& runtime;

private:
    static void take_shape(const Tensor& given, Heads& heads) {
        const Shape& shape = given.shape;
        if (shape.size() != 4 || shape[1] != int64_t(heads.kv_count) || shape[2] < 16 || shape[2] % 16 != 0 ||
            shape[3] < 16 || shape[3] % 16 != 0 || size_t(shape[3]) > most_head_size)
            refuse("keys is " + describe(given) + "; it has to be int8 [N, " + std::to_string(heads.kv_count) +
                   ", B, D] of B and D that are multiples of 16, D at most " + std::to_string(most_head_size));
        heads.size = size_t(shape[3]);
        if (heads.scale == 0.0f)
            heads.scale = 1.0f / std::sqrt(float(heads.size));
        if (heads.softcap == 0.0f)
            heads.scale *= log2_e;
    }

    // The caches after the run, which begin as those before it.
    static Caches kept_caches(const Run& run, const Shape& shape) {
        const Shape scales{shape[0], shape[1], shape[2]};
        Caches caches{};
        caches.block_tokens = size_t(shape[2]);
        caches.keys = kept<uint8_t>(run, keys, "keys", shape);
        caches.key_scales = kept<float>(run, key_scales, "key_scales", scales);
        caches.values = kept<uint8_t>(run, values, "values", shape);
        caches.value_scales = kept<float>(run, value_scales, "value_scales", scales);
        return caches;
    }

    // An output that begins as an input of the same number.
    template <class Value>
    static Value* kept(const Run& run, size_t index, const char* input, const Shape& shape) {
        const Tensor given = tensor_of_shape(run, index, input, shape);
        Value* const to = run.output<Value>(index, shape);
        if (to != given.data)
            memcpy(to, given.data, given.count() * sizeof(Value));
        return to;
    }

    static Tensor tensor_of_shape(const Run& run, size_t index, const char* input, const Shape& shape) {
        Tensor given = run.input(index);
        if (given.shape != shape)
            refuse(std::string(input) + " is " + describe(given) + "; its shape has to be " + describe(shape));
        return given;
    }

    // Return for how many positions there are angles.
    size_t take_constants(const Run& run, Heads& heads) const {
        const Shape per_head{int64_t(heads.count)};
        if (has_slopes)
            heads.slopes = tensor_of_shape(run, slopes, "slopes", per_head).floats();
        if (has_sinks)
            heads.sinks = tensor_of_shape(run, sinks, "sinks", per_head).floats();
        if (!has_rotation)
            return most_tokens;
        const Tensor given = run.input(cosines);
        if (given.shape.size() != 2 || size_t(given.shape[1]) > heads.size / 2)
            refuse("cos is " + describe(given) + "; it has to be float [P, rotated / 2] of at most " +
                   std::to_string(heads.size / 2) + " columns");
        heads.rotated = 2 * size_t(given.shape[1]);
        heads.cos = given.floats();
        heads.sin = tensor_of_shape(run, sines, "sin", given.shape).floats();
        return size_t(given.shape[0]);
    }

    // Cut the tokens of a run into stretches of the length of a task.
    static std::vector<Stretch> cut(const Run& run, const Heads& heads, const Shape& blocks, size_t tokens, size_t angles) {
        const Tensor given_pasts = run.input(pasts), given_table = run.input(table);
        const size_t sequences = given_pasts.count();
        const Tensor given_starts =
            tensor_of_shape(run, starts, "cumulative_sequence_length", {int64_t(sequences) + 1});
        if (given_table.shape.size() != 2 || size_t(given_table.shape[0]) != sequences)
            refuse("block_table is " + describe(given_table) + "; it has to be int32 [" + std::to_string(sequences) +
                   ", M], a row for each of past_seqlens");
        const auto *const first = given_starts.ints(), *const past = given_pasts.ints();
        if (first[0] != 0 || first[sequences] != int64_t(tokens))
            refuse("cumulative_sequence_length is from " + std::to_string(first[0]) + " to " +
                   std::to_string(first[sequences]) + "; it has to be from 0 to " + std::to_string(tokens));
        const size_t width = size_t(given_table.shape[1]), block_tokens = size_t(blocks[2]);
        const size_t room = std::min({width * block_tokens, angles, most_tokens});
        const size_t most = heads.group() < task_queries ? task_queries / heads.group() : 1;
        std::vector<Stretch> stretches;
        for (size_t sequence = 0; sequence < sequences; ++sequence) {
            const auto sentence = [&] { return "sequence " + std::to_string(sequence) + " has "; };
            const int64_t count = int64_t(first[sequence + 1]) - first[sequence], before = past[sequence];
            if (count < 0 || before < 0 || size_t(before + count) > room)
                refuse(sentence() + std::to_string(count) + " tokens after " + std::to_string(before) +
                       "; both have to be at least 0, and there is room for " + std::to_string(room));
            if (count == 0)
                continue;
            const int32_t* const own = given_table.ints() + sequence * width;
            for (size_t i = 0; i < (size_t(before + count) - 1) / block_tokens + 1; ++i)
                if (own[i] < 0 || own[i] >= blocks[0])
                    refuse(sentence() + "block " + std::to_string(own[i]) + "; there are " + std::to_string(blocks[0]));
            for (size_t done = 0; done < size_t(count); done += most)
                stretches.push_back({own, size_t(before) + done, size_t(first[sequence]) + done,
                                     std::min(most, size_t(count) - done)});
        }
        return stretches;
    }

    void compute(const Run& run, const Heads& heads, const Caches& caches, const std::vector<Stretch>& stretches,
                 size_t tokens, const float* from, float* out) const {
        size_t products = 0, first_section = most_tokens, last_section = 0;
        for (const Stretch& stretch : stretches) {
            const Sections sections(heads, stretch);
            products += 3 * heads.count * heads.size * stretch.count * (stretch.position + 1 - sections.start);
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
                               all_queries.scales + first, all_queries.sums + first};
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

    // The sections that a stretch attends to.
    struct Sections {
        Sections(const Heads& heads, const Stretch& stretch) {
            start = stretch.position < heads.window ? 0 : stretch.position + 1 - heads.window;
            first = start / section_tokens;
            last = (stretch.position + stretch.count - 1) / section_tokens + 1;
        }

        size_t start, first, last;
    };

    template <class Work>
    static void run_tasks(const Run& run, bool is_parallel, size_t tasks, Work work) {
        if (is_parallel)
            return run.in_parallel(tasks, work, tasks);
        for (size_t task = 0; task < tasks; ++task)
            work(task);
    }

    // Call body(index of the query, its head) for the queries of a stretch that share a key/value head.
    template <class Body>
    static void each_query(const Heads& heads, const Stretch& stretch, size_t kv_head, Body body) {
        for (size_t token = stretch.token; token < stretch.token + stretch.count; ++token)
            for (size_t head = kv_head * heads.group(); head < (kv_head + 1) * heads.group(); ++head)
                body(token * heads.count + head, head);
    }

    // An empty softmax; or one of the sink alone, whose value is 0.
    static void begin(const Heads& heads, const Stretch& stretch, size_t kv_head, const Softmax& softmax, bool has_sink) {
        has_sink = has_sink && heads.sinks;
        each_query(heads, stretch, kv_head, [&](size_t query, size_t head) {
            softmax.most[query] = has_sink ? heads.sinks[head] * log2_e : -INFINITY;
            softmax.denominator[query] = has_sink ? 1.0f : 0.0f;
            memset(softmax.values + query * heads.size, 0, heads.size * sizeof(float));
        });
    }

    static void finish(const Heads& heads, const Stretch& stretch, size_t kv_head, const Softmax& softmax) {
        each_query(heads, stretch, kv_head, [&](size_t query, size_t) {
            const float inverse = 1.0f / softmax.denominator[query];
            for (size_t d = query * heads.size; d < (query + 1) * heads.size; ++d)
                softmax.values[d] *= inverse;
        });
    }

    const Attention& attention;
    Heads fixed{};  // but for what the inputs' shapes say
    bool has_rotation, has_slopes, has_sinks;
};

}  // namespace

AttentionOperator::AttentionOperator(const Runtime& runtime, const Path& path) : runtime(runtime), attention(path.attention) {
    GetName = [](const OrtCustomOp*) { return name; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputType = [](const OrtCustomOp*, size_t index) {
        return index == keys || index == values ? element_int8
               : is_int(index)                  ? element_int32
                                                : element_float;
    };
    GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return input_count; };
    GetOutputType = [](const OrtCustomOp*, size_t index) {
        return index == keys || index == values ? element_int8 : element_float;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return output_count; };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return index <= table ? required : optional; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return required; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };  // where the provider has its memory
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
        const auto& self = *static_cast<const AttentionOperator*>(op);
        return guarded(self.runtime, [&] { *kernel = new AttentionKernel(self, Node(self.runtime, info, name)); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
        const auto& self = *static_cast<const AttentionKernel*>(kernel);
        return guarded(self.runtime, [&] { self.compute(Run(self.runtime, context)); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<AttentionKernel*>(kernel); };
}

}  // namespace kvasir
