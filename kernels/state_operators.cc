#include "path_operators.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "operator.h"
#include "pack.h"

namespace kvasir {

namespace {

void require_shape(const char* op, const char* name, const Tensor& given, const Shape& wanted) {
    if (given.shape != wanted)
        throw Refusal(std::string("kvasir.") + op + ": " + name + " is " + describe(given) + "; its shape has to be " +
                      describe(wanted));
}

// The tokens of each row that are new, [rows] of 0 to `tokens`.
const int64_t* new_tokens(const char* op, const Tensor& given, int64_t rows, int64_t tokens) {
    require_shape(op, "n_new", given, {rows});
    const auto* const counts = static_cast<const int64_t*>(given.data);
    for (int64_t i = 0; i < rows; ++i)
        if (counts[i] < 0 || counts[i] > tokens)
            throw Refusal(std::string("kvasir.") + op + ": n_new has " + std::to_string(counts[i]) + " of " +
                          std::to_string(tokens) + " tokens");
    return counts;
}

struct ConvolutionKernel {
    static constexpr const char* op_name = "Convolution";
    enum Input : size_t { x, weight, bias, past, n_new, input_count };
    static constexpr size_t optional_input = bias;

    ConvolutionKernel(const PathOperator& op, const Node& node) : runtime(op.runtime), path(op.path) {
        const Tensor given = node.constant(weight, "weight");
        if (given.shape.size() != 3 || given.shape[1] != 1 || given.count() < 1)
            node.refuse("weight is " + describe(given) + "; it has to be float [channels, 1, kernel]");
        const size_t channels = layer.channels = size_t(given.shape[0]), kernel = layer.kernel = size_t(given.shape[2]);
        layer.silu = node.flag("silu");
        layer.padded_channels = round_up(channels, lane_count);
        std::vector<float> by_tap(kernel * layer.padded_channels);
        for (size_t i = 0; i < channels * kernel; ++i)
            by_tap[i % kernel * layer.padded_channels + i / kernel] = given.floats()[i];
        weights = pad(by_tap.data(), by_tap.size());
        layer.weights = reinterpret_cast<const float*>(weights.data());
        if (node.has_input(bias)) {
            require_shape(op_name, "bias", node.constant(bias, "bias"), {given.shape[0]});
            biases = pad(node.constant(bias, "bias").floats(), channels);
            layer.bias = reinterpret_cast<const float*>(biases.data());
        }
    }

    void compute(const Run& run) const {
        const Tensor input = run.input(x), before = run.input(past);
        const size_t channels = layer.channels, kept = layer.kernel - 1;
        if (input.shape.size() != 3 || input.shape[2] != int64_t(channels))
            throw Refusal("kvasir.Convolution: x is " + describe(input) + "; its last dimension has to be " +
                          std::to_string(channels));
        const Shape shape{input.shape[0], int64_t(kept), int64_t(channels)};
        require_shape(op_name, "past", before, shape);
        const size_t tokens = size_t(input.shape[1]), blocks = layer.padded_channels / lane_count;
        const int64_t* const counts = new_tokens(op_name, run.input(n_new), input.shape[0], input.shape[1]);
        float* const y = run.output<float>(0, input.shape);
        float* const present = run.output<float>(1, shape);
        run.in_shares(size_t(shape[0]) * blocks, tokens * layer.kernel * lane_count, [&](size_t task) {
            const size_t row = task / blocks, channel = task % blocks * lane_count, first = row * tokens * channels;
            const float *const from = input.floats() + first, *const old = before.floats() + row * kept * channels;
            path.convolve(layer, old, from, tokens, channel, y + first);
            // In the same memory a token moves towards the first, so none is overwritten before it is read.
            for (size_t i = 0; i < kept; ++i) {
                const size_t at = size_t(counts[row]) + i;
                const float* const token = at < kept ? old + at * channels : from + (at - kept) * channels;
                memmove(present + (row * kept + i) * channels + channel, token + channel,
                        std::min(lane_count, channels - channel) * sizeof(float));
            }
        });
    }

    const Runtime& runtime;
    const Path& path;
    Convolution layer{};
    Lines weights, biases;
};

struct MemoryKernel {
    static constexpr const char* op_name = "Memory";
    enum Input : size_t { query, key, value, past, decay, rate, n_new, input_count };
    static constexpr size_t optional_input = rate;

    MemoryKernel(const PathOperator& op, const Node& node)
        : runtime(op.runtime), path(op.path), scale(node.number("scale", 1.0f)), has_rate(node.has_input(rate)) {}

    void compute(const Run& run) const {
        const Tensor before = run.input(past), given = run.input(value);
        const Shape& sizes = before.shape;
        if (sizes.size() != 4 || given.shape.size() != 3 || sizes[2] < 1 || sizes[2] > int64_t(most_keys))
            throw Refusal("kvasir.Memory: past is " + describe(before) + " and value " + describe(given) +
                          "; they have to be float [rows, heads, keys, values], keys from 1 to " + std::to_string(most_keys) +
                          ", and [rows, tokens, heads * values]");
        const auto floats = [&](Input input, const char* name, int64_t width) {
            const Tensor read = run.input(input);
            require_shape(op_name, name, read, {sizes[0], given.shape[1], width});
            return read.floats();
        };
        const Shape of_decays = run.input(decay).shape;
        const bool by_key = of_decays.size() == 3 && of_decays[2] == sizes[1] * sizes[2];
        const size_t decays = by_key ? size_t(sizes[2]) : 1;
        const Memory layer{size_t(sizes[1]), size_t(sizes[2]), size_t(sizes[3]), scale, decays};
        const Told told{floats(query, "query", sizes[1] * sizes[2]), floats(key, "key", sizes[1] * sizes[2]),
                        floats(value, "value", sizes[1] * sizes[3]), floats(decay, "decay", sizes[1] * int64_t(decays)),
                        has_rate ? floats(rate, "rate", sizes[1]) : nullptr};
        const int64_t* const counts = new_tokens(op_name, run.input(n_new), sizes[0], given.shape[1]);
        const size_t rows = size_t(sizes[0]), tokens = size_t(given.shape[1]), matrix = layer.keys * layer.values;
        float* const read = run.output<float>(0, given.shape);
        float* const present = run.output<float>(1, sizes);
        if (present != before.data)
            memcpy(present, before.data, before.count() * sizeof(float));
        run.in_shares(rows * layer.heads, 2 * matrix * tokens, [&](size_t task) {
            const size_t row = task / layer.heads, head = task % layer.heads, n = size_t(counts[row]);
            const size_t first = row * tokens * layer.heads;
            const Told own{told.query + first * layer.keys, told.key + first * layer.keys, told.value + first * layer.values,
                           told.decay + first * decays, told.rate ? told.rate + first : nullptr};
            float* const to = read + first * layer.values;
            // A path walks down columns, which the processor would not fetch ahead.
            const float* const next = present + std::min(task + 1, rows * layer.heads - 1) * matrix;
            for (size_t i = 0; i < matrix; i += lane_count)
                __builtin_prefetch(next + i, 1, 2);
            for (size_t column = 0; column < layer.values; column += lane_count)
                path.remember(layer, own, n, head, column, present + task * matrix, to);
            for (size_t t = n; t < tokens; ++t)  // of padding
                std::fill_n(to + (t * layer.heads + head) * layer.values, layer.values, 0.0f);
        });
    }

    const Runtime& runtime;
    const Path& path;
    const float scale;
    const bool has_rate;
};

template <class Kernel>
PathOperator state_operator(const Runtime& runtime, const Path& path, const char* name) {
    PathOperator op(runtime, path, name);
    describe_operator<PathOperator, Kernel>(op);
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return Kernel::input_count; };
    op.GetInputType = [](const OrtCustomOp*, size_t index) { return index == Kernel::n_new ? element_int64 : element_float; };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) { return i == Kernel::optional_input ? optional : required; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
    return op;
}

}  // namespace

PathOperator convolution_operator(const Runtime& runtime, const Path& path) {
    return state_operator<ConvolutionKernel>(runtime, path, ConvolutionKernel::op_name);
}

PathOperator memory_operator(const Runtime& runtime, const Path& path) {
    return state_operator<MemoryKernel>(runtime, path, MemoryKernel::op_name);
}

}  // namespace kvasir
