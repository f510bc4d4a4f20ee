#include "attention_operator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attend.h"
#include "memory.h"
#include "operator.h"

namespace kvasir {

namespace {

using Op = AttentionOperator;
using Input = Op::Input;

const std::vector<Input> block_inputs{Op::qkv,  Op::keys,  Op::key_scales, Op::values, Op::value_scales, Op::starts,
                                      Op::pasts, Op::table, Op::cosines,    Op::sines,  Op::slopes,       Op::sinks};
const std::vector<Input> text_inputs{Op::qkv, Op::starts, Op::cosines, Op::sines, Op::biases, Op::sinks};
const std::vector<Input> row_inputs{Op::qkv,     Op::keys,  Op::values, Op::ends,
                                    Op::cosines, Op::sines, Op::biases, Op::sinks};

// Of a block of keys and values that no run keeps.
constexpr size_t text_block_tokens = 16;

constexpr size_t task_queries = 48;  // of one task, where there are enough

class AttentionKernel {
public:
    AttentionKernel(const AttentionOperator& op, const Node& node) : runtime(op.runtime), op(op), attention(op.attention) {
        const int64_t count = node.integer("heads", 0), kv_count = node.integer("kv_heads", 0);
        if (count < 1 || kv_count < 1 || count % kv_count != 0 || count > most_heads)
            node.refuse("the attributes heads and kv_heads are " + std::to_string(count) + " and " + std::to_string(kv_count) +
                        "; both have to be from 1 to " + std::to_string(most_heads) + ", and heads a multiple of kv_heads");
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
        fixed.reads_only = op.has_rows && !node.flag("appends");
        fixed.looks_ahead = fixed.reads_only || (!op.has_caches && node.flag("looks_ahead"));
        for (size_t i = 0; i < op.inputs.size(); ++i)
            if (node.has_input(i))
                places[op.inputs[i]] = int(i);
        if (fixed.reads_only && (window != -1 || has(Op::cosines)))
            node.refuse("keys that are only read have neither windows nor rotations");
        if (has(Op::cosines) != has(Op::sines))
            node.refuse("the inputs cos and sin have to be there together");
        if (op.has_floats && (has(Op::key_scales) || has(Op::value_scales) || has(Op::values) != op.has_caches))
            node.refuse("keys and values of floats have to be there together, without scales");
        if (!op.has_floats && !op.has_rows && has(Op::values) != has(Op::value_scales))
            node.refuse("the inputs values and value_scales have to be there together");
        if (op.has_blocks && !op.has_floats && !has(Op::key_scales))
            node.refuse("the input key_scales has to be there");
        fixed.shared = op.has_blocks && !has(Op::values);
    }

    void compute(const Run& run) const {
        Heads heads = fixed;
        const Tensor inputs = input(run, Op::qkv);
        const size_t all_heads = heads.count + 2 * heads.kv_count;
        Shape shape = inputs.shape, blocks;
        if (op.has_caches)
            blocks = take_blocks(run, heads);
        else if (!shape.empty())
            heads.size = size_t(shape.back()) / all_heads;
        if (shape.empty() || shape.back() != int64_t(heads.row_width()) || !is_head_size(heads.size))
            refuse("qkv is " + describe(inputs) + "; its last dimension has to be " +
                   (op.has_caches ? std::to_string(heads.row_width())
                                  : std::to_string(all_heads) + " times a multiple of 16, at most " +
                                        std::to_string(most_head_size)));
        if (heads.scale == 0.0f)
            heads.scale = 1.0f / std::sqrt(float(heads.size));
        if (heads.softcap == 0.0f)
            heads.scale *= log2_e;
        const size_t tokens = inputs.count() / heads.row_width();
        shape.back() = int64_t(heads.count * heads.size);
        const size_t room = take_constants(run, heads);
        std::vector<int32_t> own_table;
        const std::vector<Stretch> stretches =
            op.has_rows ? cut_rows(run, heads, blocks, inputs, room, own_table) : cut(run, heads, blocks, tokens, room, own_table);
        const Caches caches = op.has_caches ? kept_caches(run, blocks) : new_caches(heads, own_table.size());
        float* const out = run.output<float>(0, shape);
        if (op.has_rows)  // padding attends to nothing
            memset(out, 0, tokens * heads.count * heads.size * sizeof(float));
        if (tokens)
            attend(run, attention, heads, caches, stretches, tokens, inputs.floats(), out);
    }

    const Runtime& runtime;

private:
    static bool is_head_size(size_t size) { return size >= 16 && size % 16 == 0 && size <= most_head_size; }

    [[noreturn]] void refuse(const std::string& what) const { throw Refusal(std::string("kvasir.") + op.name + ": " + what); }

    bool has(Input input) const { return places[input] >= 0; }
    Tensor input(const Run& run, Input input) const { return run.input(size_t(places[input])); }

    // Return the shape of keys.
    Shape take_blocks(const Run& run, Heads& heads) const {
        const Tensor given = input(run, Op::keys);
        const Shape& shape = given.shape;
        const bool has_groups = shape.size() == 4 && shape[2] >= 16 && shape[2] % 16 == 0;
        if (shape.size() != 4 || shape[1] != int64_t(heads.kv_count) || !(has_groups || (op.has_rows && shape[2] > 0)) ||
            !is_head_size(size_t(shape[3])))
            refuse("keys is " + describe(given) + "; it has to be " + (op.has_floats ? "float" : "int8") + " [N, " +
                   std::to_string(heads.kv_count) + ", B, D] of " + (op.has_rows ? "B from 1 on and D" : "B and D") +
                   " in multiples of 16, D at most " + std::to_string(most_head_size));
        heads.size = size_t(shape[3]);
        return shape;
    }

    // Room for the keys and values of whole texts, which no later run reads.
    Caches new_caches(const Heads& heads, size_t blocks) const {
        const size_t tokens = blocks * heads.kv_count * text_block_tokens;
        const size_t bytes = tokens * heads.size * (op.has_floats ? sizeof(float) : 1);
        const size_t all_bytes = 2 * (bytes + tokens * sizeof(float));
        thread_local Lines room;
        if (room.size() * sizeof(CacheLine) < all_bytes)
            room = lines_of(all_bytes);
        unsigned char* const at = room.data()->bytes;
        auto* const scales = reinterpret_cast<float*>(at + 2 * bytes);
        return {text_block_tokens, false, at, scales, at + bytes, scales + tokens};
    }

    // The caches after the run, which begin as those before it.
    Caches kept_caches(const Run& run, const Shape& shape) const {
        const Shape scales{shape[0], shape[1], shape[2]};
        Caches caches{};
        caches.block_tokens = size_t(shape[2]);
        caches.plain = op.has_rows;
        caches.narrow = op.has_rows && !op.has_floats;
        if (fixed.reads_only) {
            const auto read = [&](Input which, const char* name) {
                return reinterpret_cast<uint8_t*>(const_cast<float*>(tensor_of_shape(run, which, name, shape).floats()));
            };
            caches.keys = read(Op::keys, "keys");
            caches.values = read(Op::values, "values");
            return caches;
        }
        if (op.has_floats) {
            caches.keys = reinterpret_cast<uint8_t*>(kept<float>(run, Op::keys, "keys", shape));
            caches.values = reinterpret_cast<uint8_t*>(kept<float>(run, Op::values, "values", shape));
            return caches;
        }
        caches.keys = kept<uint8_t>(run, Op::keys, "keys", shape);
        if (op.has_rows) {
            caches.values = kept<uint8_t>(run, Op::values, "values", shape);
            return caches;
        }
        caches.key_scales = kept<float>(run, Op::key_scales, "key_scales", scales);
        caches.values = fixed.shared ? nullptr : kept<uint8_t>(run, Op::values, "values", shape);
        caches.value_scales = fixed.shared ? caches.key_scales : kept<float>(run, Op::value_scales, "value_scales", scales);
        return caches;
    }

    // An output that begins as an input of the same number.
    template <class Value>
    Value* kept(const Run& run, Input which, const char* name, const Shape& shape) const {
        const Tensor given = tensor_of_shape(run, which, name, shape);
        const size_t place = op.has_rows ? size_t(places[which]) : size_t(which);
        Value* const to = run.output<Value>(place, shape);
        if (to != given.data)
            memcpy(to, given.data, given.count() * sizeof(Value));
        return to;
    }

    Tensor tensor_of_shape(const Run& run, Input which, const char* name, const Shape& shape) const {
        Tensor given = input(run, which);
        if (given.shape != shape)
            refuse(std::string(name) + " is " + describe(given) + "; its shape has to be " + describe(shape));
        return given;
    }

    // Return for how many positions there are angles and biases.
    size_t take_constants(const Run& run, Heads& heads) const {
        const Shape per_head{int64_t(heads.count)};
        if (has(Op::slopes))
            heads.slopes = tensor_of_shape(run, Op::slopes, "slopes", per_head).floats();
        if (has(Op::sinks))
            heads.sinks = tensor_of_shape(run, Op::sinks, "sinks", per_head).floats();
        size_t room = most_tokens;
        if (has(Op::biases)) {
            const Shape given = input(run, Op::biases).shape;
            const int64_t width = given.empty() ? 0 : given.back();
            heads.bias_width = size_t(width);
            if (!op.has_rows) {
                tensor_of_shape(run, Op::biases, "biases", {1, per_head[0], width, width});
                room = heads.bias_rows = size_t(width);
            }
        }
        if (!has(Op::cosines))
            return room;
        const Tensor given = input(run, Op::cosines);
        if (given.shape.size() != 2 || size_t(given.shape[1]) > heads.size / 2)
            refuse("cos is " + describe(given) + "; it has to be float [P, rotated / 2] of at most " +
                   std::to_string(heads.size / 2) + " columns");
        heads.rotated = 2 * size_t(given.shape[1]);
        heads.cos = given.floats();
        heads.sin = tensor_of_shape(run, Op::sines, "sin", given.shape).floats();
        return std::min(room, size_t(given.shape[0]));
    }

    // Cut the tokens of a run into stretches of the length of a task. Texts get blocks of their own, in order.
    std::vector<Stretch> cut(const Run& run, const Heads& heads, const Shape& blocks, size_t tokens, size_t room,
                             std::vector<int32_t>& own_table) const {
        const Tensor given_starts = input(run, Op::starts);
        const size_t sequences = op.has_blocks ? input(run, Op::pasts).count() : std::max<size_t>(given_starts.count(), 1) - 1;
        const int32_t* const first =
            tensor_of_shape(run, Op::starts, "cumulative_sequence_length", {int64_t(sequences) + 1}).ints();
        if (first[0] != 0 || first[sequences] != int64_t(tokens))
            refuse("cumulative_sequence_length is from " + std::to_string(first[0]) + " to " +
                   std::to_string(first[sequences]) + "; it has to be from 0 to " + std::to_string(tokens));
        const int32_t *past = nullptr, *table = nullptr;
        size_t width = 0, block_tokens = text_block_tokens;
        if (op.has_blocks) {
            const Tensor given = input(run, Op::table);
            if (given.shape.size() != 2 || size_t(given.shape[0]) != sequences)
                refuse("block_table is " + describe(given) + "; it has to be int32 [" + std::to_string(sequences) +
                       ", M], a row for each of past_seqlens");
            past = input(run, Op::pasts).ints();
            table = given.ints();
            width = size_t(given.shape[1]);
            block_tokens = size_t(blocks[2]);
            room = std::min(room, width * block_tokens);
        } else {
            own_table.resize(tokens / block_tokens + sequences);
            std::iota(own_table.begin(), own_table.end(), 0);
            table = own_table.data();
        }
        room = std::min(room, most_tokens);
        const float* const biases = has(Op::biases) ? input(run, Op::biases).floats() : nullptr;
        std::vector<Stretch> stretches;
        for (size_t sequence = 0; sequence < sequences; ++sequence, table += width) {
            const auto sentence = [&] { return "sequence " + std::to_string(sequence) + " has "; };
            const int64_t count = int64_t(first[sequence + 1]) - first[sequence], before = past ? past[sequence] : 0;
            if (count < 0 || before < 0 || size_t(before + count) > room)
                refuse(sentence() + std::to_string(count) + " tokens after " + std::to_string(before) +
                       "; both have to be at least 0, and there is room for " + std::to_string(room));
            if (count == 0)
                continue;
            const size_t length = size_t(before + count), own_blocks = (length - 1) / block_tokens + 1;
            for (size_t i = 0; op.has_blocks && i < own_blocks; ++i)
                if (table[i] < 0 || table[i] >= blocks[0])
                    refuse(sentence() + "block " + std::to_string(table[i]) + "; there are " + std::to_string(blocks[0]));
            add_stretches(heads, {table, length, size_t(before), size_t(first[sequence]), size_t(count), biases, size_t(before)},
                          stretches);
            if (!op.has_blocks)
                table += own_blocks;
        }
        return stretches;
    }

    // The same of rows, which are blocks. qkv is [B, n, width]; row b has ends[b] + 1 tokens after the run, of which the last
    // n are new or, of fewer, all: then the others of the n are padding.
    std::vector<Stretch> cut_rows(const Run& run, Heads& heads, const Shape& rows, const Tensor& given, size_t room,
                                  std::vector<int32_t>& own_table) const {
        if (given.shape.size() != 3 || given.shape[0] != rows[0])
            refuse("qkv is " + describe(given) + "; it has to be [" + std::to_string(rows[0]) + ", tokens, channels]");
        const size_t count = size_t(rows[0]), tokens = size_t(given.shape[1]);
        const int32_t* const ends = tensor_of_shape(run, Op::ends, "seqlens_k", {rows[0]}).ints();
        const float* biases = nullptr;
        size_t biases_of_row = 0;
        if (has(Op::biases)) {
            const Tensor of_scores = input(run, Op::biases);
            const Shape shape{count > 0 && of_scores.shape.size() == 4 && of_scores.shape[0] == 1 ? 1 : rows[0],
                              int64_t(heads.count), given.shape[1], int64_t(heads.bias_width)};
            biases = tensor_of_shape(run, Op::biases, "biases", shape).floats();
            heads.bias_rows = tokens;
            biases_of_row = shape[0] == 1 ? 0 : heads.count * tokens * heads.bias_width;
            room = std::min(room, heads.bias_width);
        }
        own_table.resize(count);
        std::iota(own_table.begin(), own_table.end(), 0);
        room = std::min({room, size_t(rows[2]), most_tokens});
        std::vector<Stretch> stretches;
        for (size_t row = 0; row < count; ++row) {
            const int64_t length = int64_t(ends[row]) + 1;
            if (length < 1 || size_t(length) > room)
                refuse("row " + std::to_string(row) + " has " + std::to_string(length) + " tokens; there have to be 1 to " +
                       std::to_string(room));
            const size_t own = heads.reads_only ? tokens : std::min(tokens, size_t(length));
            const size_t position = heads.reads_only ? 0 : size_t(length) - own;
            add_stretches(heads,
                          {&own_table[row], size_t(length), position, row * tokens, own,
                           biases ? biases + row * biases_of_row : nullptr, 0},
                          stretches);
        }
        return stretches;
    }

    // Add the tokens of a sequence in stretches of the length of a task.
    static void add_stretches(const Heads& heads, const Stretch& all, std::vector<Stretch>& stretches) {
        const size_t most = heads.group() < task_queries ? task_queries / heads.group() : 1;
        for (size_t done = 0; done < all.count; done += most)
            stretches.push_back({all.blocks, all.length, all.position + done, all.token + done,
                                 std::min(most, all.count - done), all.biases, all.bias_row + done});
    }

    const AttentionOperator& op;
    const Attention& attention;
    Heads fixed{};  // but for what the inputs' shapes say
    std::vector<int> places = std::vector<int>(Op::input_count, -1);  // of inputs; -1 is none
};

const AttentionOperator& as_attention(const OrtCustomOp* op) { return *static_cast<const AttentionOperator*>(op); }

ElementType of_caches(const OrtCustomOp* op) { return as_attention(op).has_floats ? element_float : element_int8; }

}  // namespace

AttentionOperator::AttentionOperator(const Runtime& runtime, const Path& path, Kind kind)
    : runtime(runtime),
      attention(kind == blocks || kind == texts ? path.attention : path.float_attention),
      has_blocks(kind == blocks || kind == float_blocks),
      has_rows(kind == float_rows || kind == byte_rows),
      has_floats(kind == float_blocks || kind == float_texts || kind == float_rows),
      has_caches(has_blocks || has_rows),
      name(kind == blocks         ? "Attention"
           : kind == float_blocks ? "Attention32"
           : kind == texts        ? "TextAttention"
           : kind == float_texts  ? "TextAttention32"
           : kind == float_rows   ? "RowAttention"
                                  : "RowAttention8"),
      inputs(has_blocks ? block_inputs : has_rows ? row_inputs : text_inputs) {
    describe_operator<AttentionOperator, AttentionKernel>(*this);
    GetInputType = [](const OrtCustomOp* op, size_t index) {
        const Input input = as_attention(op).inputs[index];
        return input == keys || input == values                      ? of_caches(op)
               : input >= starts && input <= ends                    ? element_int32
                                                                     : element_float;
    };
    GetInputTypeCount = [](const OrtCustomOp* op) { return as_attention(op).inputs.size(); };
    // Outputs after the first are caches, at the places of their inputs.
    GetOutputType = [](const OrtCustomOp* op, size_t index) {
        const Input input = as_attention(op).inputs[index];
        return index && (input == keys || input == values) ? of_caches(op) : element_float;
    };
    GetOutputTypeCount = [](const OrtCustomOp* op) -> size_t {
        return as_attention(op).has_blocks ? value_scales + 1 : as_attention(op).has_rows ? 3 : 1;
    };
    GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) {
        const auto& self = as_attention(op);
        const Input input = self.inputs[index];
        const bool is_needed = self.has_rows ? input <= ends : input <= table && input != values;
        return is_needed && input != key_scales && input != value_scales ? required : optional;
    };
    GetOutputCharacteristic = [](const OrtCustomOp* op, size_t index) {
        return index == 0 || (index == 1 && as_attention(op).has_blocks) ? required : optional;
    };
}

}  // namespace kvasir
