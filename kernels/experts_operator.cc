#include "experts_operator.h"

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "operator.h"
#include "pack.h"
#include "pages.h"

namespace kvasir {

namespace {

enum Input : size_t { x, routes, up, up_scales, up_bias, down, down_scales, down_bias, input_count };

// Rows of one task.
constexpr size_t prepared_rows = 8, multiplied_rows = 48;

// A linear layer of all experts, packed.
struct Layers {
    std::vector<Layer> of;  // each expert
    std::vector<Lines> kept;
    size_t inputs, outputs;
};

class ExpertsKernel {
public:
    ExpertsKernel(const ExpertsOperator& op, const Node& node)
        : runtime(op.runtime), op(op), limit(node.number("limit", 0.0f)) {
        if (!(limit >= 0.0f))
            node.refuse("the attribute limit has to be at least 0");
        first = take(node, up, "up", true);
        second = take(node, down, "down", false);
        if (first.of.size() != second.of.size() || first.outputs != 2 * second.inputs)
            node.refuse("up is of " + std::to_string(first.of.size()) + " experts and " + std::to_string(first.outputs) +
                        " outputs, and down of " + std::to_string(second.of.size()) + " and " +
                        std::to_string(second.inputs) + " inputs, which have to be half as many");
        for (Layer& layer : second.of) {
            layer.gated = true;
            layer.activation = limit > 0.0f ? Activation::quick_gelu : Activation::silu;
            layer.limit = limit;
        }
    }

    void compute(const Run& run) const {
        const Tensor given = run.input(x), shares = run.input(routes);
        const size_t count = first.of.size();
        const size_t rows = given.shape.size() == 2 ? size_t(given.shape[0]) : 0;
        if (given.shape != Shape{int64_t(rows), int64_t(first.inputs)} || shares.shape != Shape{int64_t(rows), int64_t(count)})
            throw Refusal("kvasir." + std::string(op.name) + ": x is " + describe(given) + " and routes " + describe(shares) +
                          "; they have to be float [rows, " + std::to_string(first.inputs) + "] and [rows, " +
                          std::to_string(count) + "]");
        float* const out = run.output<float>(0, {int64_t(rows), int64_t(second.outputs)});
        if (!rows)
            return;
        // Rows in the order of their experts: expert e has order[starts[e]] to order[starts[e + 1] - 1].
        std::vector<size_t> expert(rows), starts(count + 1, 0), order(rows);
        for (size_t row = 0; row < rows; ++row) {
            const float* const of_row = shares.floats() + row * count;
            expert[row] = size_t(std::max_element(of_row, of_row + count) - of_row);
            ++starts[expert[row] + 1];
        }
        for (size_t e = 0; e < count; ++e)
            starts[e + 1] += starts[e];
        std::vector<size_t> next(starts.begin(), starts.end() - 1);
        for (size_t row = 0; row < rows; ++row)
            order[next[expert[row]]++] = row;

        std::vector<float> inputs(rows * first.inputs), hidden(rows * first.outputs), made(rows * second.outputs);
        for (size_t m = 0; m < rows; ++m)
            memcpy(&inputs[m * first.inputs], given.floats() + order[m] * first.inputs, first.inputs * sizeof(float));
        multiply(run, first, starts, inputs.data(), hidden.data());
        multiply(run, second, starts, hidden.data(), made.data());
        for (size_t m = 0; m < rows; ++m)
            memcpy(out + order[m] * second.outputs, &made[m * second.outputs], second.outputs * sizeof(float));
    }

    const Runtime& runtime;

private:
    // Rows of one expert: [first, last).
    struct Part {
        const Layer& layer;
        size_t first, last;
    };

    void multiply(const Run& run, const Layers& layers, const std::vector<size_t>& starts, const float* from,
                  float* to) const {
        std::vector<Part> to_prepare, to_multiply;
        for (size_t e = 0; e < layers.of.size(); ++e) {
            add_parts(layers.of[e], starts[e], starts[e + 1], prepared_rows, to_prepare);
            add_parts(layers.of[e], starts[e], starts[e + 1], multiplied_rows, to_multiply);
        }
        const Layer& any = layers.of[0];
        const size_t rows = starts.back();
        Lines values = lines_of(round_up(rows, row_padding) * any.padded_inputs * op.product.input_bytes);
        std::vector<float> scales(rows * any.blocks), room(to_prepare.size() * any.padded_inputs);
        std::vector<int32_t> sums(rows * any.blocks);
        const RoundedRows rounded{values.data(), scales.data(), sums.data()};
        run.in_parallel(to_prepare.size(), [&](size_t task) {
            const Part& part = to_prepare[task];
            for (size_t m = part.first; m < part.last; ++m)
                op.product.prepare(part.layer, from + m * any.row_width(), &room[task * any.padded_inputs], rounded, m);
        });
        const size_t tiles = (any.outputs + tile_columns - 1) / tile_columns;
        run.in_parallel(tiles * to_multiply.size(), [&](size_t task) {
            const Part& part = to_multiply[task / tiles];
            op.product.multiply(part.layer, rounded, part.first, part.last, task % tiles * tile_columns, nullptr, to);
        });
    }

    static void add_parts(const Layer& layer, size_t begin, size_t end, size_t step, std::vector<Part>& parts) {
        for (; begin < end; begin += step)
            parts.push_back({layer, begin, std::min(begin + step, end)});
    }

    // A layer's inputs: matrices [E, N, K], perhaps scales [E, N, K / 32] and a bias [E, N]. Of interleaved ones rows 2i are
    // gates and rows 2i + 1 what they gate; packed, all gates come first.
    struct Given {
        Tensor matrices, scales, bias;
        bool has_bias, interleaved;

        size_t outputs() const { return size_t(matrices.shape[1]); }

        // The rows of one expert of an array, each of so many bytes, in the order in which they are packed.
        std::vector<unsigned char> rows(const Tensor& of, size_t expert, size_t bytes) const {
            const size_t half = outputs() / 2;
            std::vector<unsigned char> ordered(outputs() * bytes);
            for (size_t n = 0; n < outputs(); ++n) {
                const size_t at = !interleaved ? n : n < half ? 2 * n : 2 * (n - half) + 1;
                memcpy(&ordered[n * bytes], static_cast<const char*>(of.data) + (expert * outputs() + at) * bytes, bytes);
            }
            return ordered;
        }
    };

    // Pack the layers of an input, whose scales and bias come after it.
    Layers take(const Node& node, Input matrices, const char* name, bool interleaved) const {
        const Given given{node.constant(matrices, name),
                          node.has_input(matrices + 1) ? node.constant(matrices + 1, "scales") : Tensor{},
                          node.has_input(matrices + 2) ? node.constant(matrices + 2, "bias") : Tensor{},
                          node.has_input(matrices + 2), interleaved};
        const Tensor& weights = given.matrices;
        if (weights.type != (is_float() ? element_float : element_uint8) || weights.shape.size() != 3 || weights.count() < 1 ||
            (interleaved && weights.shape[1] % 2))
            node.refuse(std::string(name) + " is " + describe(weights) + "; it has to be " + (is_float() ? "float" : "uint8") +
                        " [experts, outputs, inputs], none of them 0" + (interleaved ? ", of even outputs" : ""));
        Layers layers;
        layers.outputs = given.outputs();
        layers.inputs = size_t(weights.shape[2]) * (op.weights == Weights::nibbles ? 2 : 1);
        if (layers.inputs > most_inputs || (!is_float() && layers.inputs % nibble_block))
            node.refuse(std::string(name) + " has " + std::to_string(layers.inputs) + " inputs; they have to be at most " +
                        std::to_string(most_inputs) + ", in whole blocks of " + std::to_string(nibble_block));
        const size_t count = size_t(weights.shape[0]), rows = count * layers.outputs;
        const bool is_type = given.scales.type == element_float || given.scales.type == element_float16;
        if (is_float() ? node.has_input(matrices + 1)
                       : !is_type || given.scales.count() != rows * (layers.inputs / nibble_block))
            node.refuse("the scales of " + std::string(name) + " have to be floats or float16, one for each " +
                        std::to_string(nibble_block) + " inputs, and none where weights are floats");
        if (given.has_bias && (given.bias.type != element_float || given.bias.count() != rows))
            node.refuse("the bias of " + std::string(name) + " is " + describe(given.bias) + "; it has to be float [" +
                        std::to_string(count) + ", " + std::to_string(layers.outputs) + "]");
        for (size_t expert = 0; expert < count; ++expert)
            layers.of.push_back(pack(given, expert, layers));
        give_back(weights.data, weights.count() * (is_float() ? sizeof(float) : 1));
        return layers;
    }

    // Pack one expert's layer, of whose arrays `layers` takes care.
    Layer pack(const Given& given, size_t expert, Layers& layers) const {
        const auto keep = [&](Lines lines) {
            layers.kept.push_back(std::move(lines));
            return layers.kept.back().data()->bytes;
        };
        const auto keep_floats = [&](Lines lines) { return reinterpret_cast<const float*>(keep(std::move(lines))); };
        Layer layer{};
        layer.inputs = layers.inputs;
        layer.outputs = layers.outputs;
        layer.block = nibble_block;
        layer.blocks = is_float() ? 1 : layers.inputs / nibble_block;
        layer.padded_inputs = op.weights == Weights::bytes ? round_up(layers.inputs, input_padding) : layers.inputs;
        const size_t row_bytes = size_t(given.matrices.shape[2]) * (is_float() ? sizeof(float) : 1);
        std::vector<unsigned char> own = given.rows(given.matrices, expert, row_bytes);
        switch (op.weights) {
        case Weights::bytes:
            for (unsigned char& byte : own)
                byte ^= 128;
            layer.weights = keep(pack_bytes(layer, reinterpret_cast<int8_t*>(own.data()), true, op.product.zero_point));
            break;
        case Weights::nibbles: layer.weights = keep(pack_nibbles(layer, own.data())); break;
        case Weights::floats: layer.weights = keep(pack_floats(layer, reinterpret_cast<float*>(own.data()), true)); break;
        }
        if (given.scales.type == element_float16) {
            const auto ordered = given.rows(given.scales, expert, layer.blocks * sizeof(uint16_t));
            layer.scales = keep_floats(pack_block_scales(layer, reinterpret_cast<const uint16_t*>(ordered.data())));
        } else if (!is_float()) {
            const auto ordered = given.rows(given.scales, expert, layer.blocks * sizeof(float));
            layer.scales = keep_floats(pack_block_scales(layer, reinterpret_cast<const float*>(ordered.data())));
        }
        if (given.has_bias) {
            const auto ordered = given.rows(given.bias, expert, sizeof(float));
            layer.bias = keep_floats(pad(reinterpret_cast<const float*>(ordered.data()), layers.outputs));
        }
        return layer;
    }

    bool is_float() const { return op.weights == Weights::floats; }

    const ExpertsOperator& op;
    const float limit;
    Layers first, second;
};

}  // namespace

ExpertsOperator::ExpertsOperator(const Runtime& runtime, const Path& path, Weights weights)
    : runtime(runtime),
      weights(weights),
      product(weights == Weights::bytes ? path.block_bytes : weights == Weights::nibbles ? path.nibbles : path.floats),
      name(weights == Weights::bytes ? "Experts" : weights == Weights::nibbles ? "Experts4" : "Experts32") {
    describe_operator<ExpertsOperator, ExpertsKernel>(*this);
    GetInputType = [](const OrtCustomOp* op, size_t index) {
        const bool is_float = static_cast<const ExpertsOperator*>(op)->weights == Weights::floats;
        if ((index == up_scales || index == down_scales) && !is_float)
            return element_any;  // float or float16
        return (index == up || index == down) && !is_float ? element_uint8 : element_float;
    };
    GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return input_count; };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
        return index <= up || index == down ? required : optional;
    };
}

}  // namespace kvasir
