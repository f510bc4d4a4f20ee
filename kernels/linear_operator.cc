#include "linear_operator.h"

#include <cstring>
#include <optional>

#include "adapters.h"
#include "memory.h"
#include "pack.h"
#include "pages.h"
#include "operator.h"

namespace kvasir {

namespace {

enum Input : size_t { x, weight, scales, bias, norm_weight, norm_bias, residual, adapters, adapter_table, input_count };

// Below these a task costs more than it saves.
constexpr size_t fewest_parallel_inputs = 1 << 14;
constexpr size_t fewest_parallel_products = 1 << 17;
// Rows of one task; 48 is a multiple of each path's rows in a tile.
constexpr size_t prepared_rows = paired_rows, multiplied_rows = 48;

class LinearKernel {
public:
    LinearKernel(const LinearOperator& op, const Node& node)
        : runtime(op.runtime), path(op.path), product(op.product), name(op.name), parts(Parts::of(node)) {
        layer.activation = node.choice<Activation>(
            "activation", {"", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"});
        layer.norm = node.choice<Norm>("norm", {"", "rms", "layer"});
        layer.gated = node.flag("gated");
        layer.epsilon = node.number("epsilon", -1.0f);
        if (layer.norm != Norm::none && !(layer.epsilon >= 0.0f))
            node.refuse("the attribute epsilon has to be there, and at least 0, where norm is");
        switch (op.weights) {
        case Weights::bytes: take_bytes(node); break;
        case Weights::nibbles: take_nibbles(node); break;
        case Weights::floats: take_floats(node); break;
        }

        layer.mixed = node.flag("mixed");
        if (layer.mixed && layer.inputs % mixed_parts != 0)
            node.refuse("the attribute mixed is for inputs in eight parts, and there are " + std::to_string(layer.inputs));
        layer.bias = optional_floats(node, bias, "bias", layer.outputs, bias_values);
        layer.norm_weight = optional_floats(node, norm_weight, "norm", layer.inputs, norm_weights);
        layer.norm_bias = optional_floats(node, norm_bias, "norm_bias", layer.inputs, norm_biases);
        if (layer.norm == Norm::none && (layer.norm_weight || layer.norm_bias))
            node.refuse("the inputs norm and norm_bias need the attribute norm");
        has_residual = node.has_input(residual);
        if ((parts.count > 0) != node.has_input(adapters) || node.has_input(adapters) != node.has_input(adapter_table))
            node.refuse("the inputs adapters and adapter_table, and the attribute parts, need each other");
    }

    void compute(const Run& run) const {
        const Tensor input = run.input(x);
        Shape shape = input.shape;
        if (shape.empty() || shape.back() != int64_t(layer.row_width()))
            throw Refusal("kvasir." + name + ": x is " + describe(input) + "; its last dimension has to be " +
                          std::to_string(layer.row_width()));
        const size_t rows = input.count() / layer.row_width();
        shape.back() = int64_t(layer.outputs);
        const float* added = nullptr;
        if (has_residual) {
            const Tensor tensor = run.input(residual);
            if (tensor.shape != shape)
                throw Refusal("kvasir." + name + ": residual is " + describe(tensor) + "; it has to be " + describe(shape));
            added = tensor.floats();
        }
        float* const out = run.output<float>(0, shape);
        if (!rows)
            return;
        std::optional<RowAdapters> of_rows;
        if (parts.count)
            if (const Tensor named = run.input(adapters); named.count())
                of_rows.emplace(path, parts, name, named, run.input(adapter_table), rows, layer.inputs, layer.outputs);
        compute(run, rows, input.floats(), added, of_rows && !of_rows->are_none() ? &*of_rows : nullptr, out);
    }

    const Runtime& runtime;

private:
    // of_rows: null if no row has an adapter.
    void compute(const Run& run, size_t rows, const float* from, const float* added, const RowAdapters* of_rows,
                 float* out) const {
        const bool is_short = rows * layer.row_width() < fewest_parallel_inputs && !of_rows;
        const size_t prepare_step = is_short ? rows : prepared_rows;
        const size_t prepare_tasks = (rows + prepare_step - 1) / prepare_step;
        const size_t values_bytes = round_up(rows, row_padding) * layer.padded_inputs * product.input_bytes;
        const size_t scales_bytes = round_up(rows * layer.blocks * sizeof(float), sizeof(CacheLine));
        const size_t row_bytes = layer.padded_inputs * sizeof(float);
        // Adapters read what was prepared, which is x itself where nothing is done to it.
        const bool keeps_rows = of_rows && (layer.activation != Activation::none || layer.gated ||
                                            layer.norm != Norm::none || layer.mixed);
        const size_t kept_rows = keeps_rows ? rows : prepare_tasks;
        const size_t projected_bytes = of_rows ? rows * of_rows->width() * sizeof(float) : 0;

        // A thread computes one operator at a time, and the largest room serves them all.
        thread_local Lines room;
        const size_t lines =
            (values_bytes + 2 * scales_bytes + kept_rows * row_bytes + projected_bytes) / sizeof(CacheLine);
        if (room.size() < lines)
            room.resize(lines);
        unsigned char* at = room.data()->bytes;
        const RoundedRows rounded{at, reinterpret_cast<float*>(at + values_bytes),
                                  reinterpret_cast<int32_t*>(at + values_bytes + scales_bytes)};
        auto* const y = reinterpret_cast<float*>(at + values_bytes + 2 * scales_bytes);
        float* const h = y + kept_rows * layer.padded_inputs;  // whose rows are whole cache lines
        const FloatRows read{keeps_rows ? y : from, keeps_rows ? layer.padded_inputs : layer.inputs, layer.inputs};

        run.in_parallel(prepare_tasks, [&](size_t task) {
            const size_t first = task * prepare_step, last = first + prepare_step < rows ? first + prepare_step : rows;
            for (size_t m = first; m < last; ++m)
                product.prepare(layer, from + m * layer.row_width(), y + (keeps_rows ? m : task) * layer.padded_inputs,
                                rounded, m);
            if (of_rows)
                of_rows->project(read, first, last, h);
        });

        const size_t tiles = (layer.outputs + tile_columns - 1) / tile_columns;
        const size_t row_tasks = (rows + multiplied_rows - 1) / multiplied_rows;
        const auto multiply = [&](size_t task) {
            const size_t first = task % row_tasks * multiplied_rows;
            const size_t last = first + multiplied_rows < rows ? first + multiplied_rows : rows;
            const size_t column = task / row_tasks * tile_columns;
            product.multiply(layer, rounded, first, last, column, added, out);
            if (of_rows)
                of_rows->expand(h, first, last, column, column + tile_columns, out);
        };
        if (rows * layer.inputs * layer.outputs >= fewest_parallel_products)
            return run.in_parallel(tiles * row_tasks, multiply);
        for (size_t task = 0; task < tiles * row_tasks; ++task)
            multiply(task);
    }

    void take_bytes(const Node& node) {
        const Tensor given = node.constant(weight, "weight");
        const bool transposed = node.flag("transposed");
        if (given.type != element_int8 || given.shape.size() != 2)
            node.refuse("weight is " + describe(given) + "; it has to be int8 of two dimensions");
        set_shape(node, size_t(given.shape[transposed]), size_t(given.shape[!transposed]));
        const int64_t block = node.integer("block", 0);
        if (block < 0 || block % int64_t(input_padding) != 0)
            node.refuse("the attribute block is " + std::to_string(block) + "; it has to be a multiple of 64, or 0");
        if (block && size_t(block) < layer.inputs)
            layer.block = size_t(block);
        layer.blocks = (layer.inputs + layer.block - 1) / layer.block;
        weights = pack_bytes(layer, static_cast<const int8_t*>(given.data), transposed, product.zero_point);
        give_back(given.data, given.count());
        layer.weights = weights.data()->bytes;
        scale_values = pad(floats(node, scales, "scales", layer.outputs), layer.outputs);
        layer.scales = reinterpret_cast<const float*>(scale_values.data());
    }

    void take_floats(const Node& node) {
        const Tensor given = node.constant(weight, "weight");
        const bool transposed = node.flag("transposed");
        if (given.type != element_float || given.shape.size() != 2)
            node.refuse("weight is " + describe(given) + "; it has to be float of two dimensions");
        if (node.has_input(scales))
            node.refuse("weights of floats have no scales");
        set_shape(node, size_t(given.shape[transposed]), size_t(given.shape[!transposed]));
        layer.blocks = 1;
        weights = pack_floats(layer, given.floats(), transposed);
        give_back(given.data, given.count() * sizeof(float));
        layer.weights = weights.data()->bytes;
    }

    void take_nibbles(const Node& node) {
        const Tensor given = node.constant(weight, "weight");
        if (given.type != element_uint8 || given.shape.size() != 3 || given.shape[2] != nibble_block / 2)
            node.refuse("weight is " + describe(given) + "; it has to be uint8 [N, K / 32, 16]");
        set_shape(node, size_t(given.shape[1]) * nibble_block, size_t(given.shape[0]));
        layer.block = nibble_block;
        layer.blocks = layer.inputs / nibble_block;
        layer.padded_inputs = layer.inputs;
        weights = pack_nibbles(layer, static_cast<const uint8_t*>(given.data));
        give_back(given.data, given.count());
        layer.weights = weights.data()->bytes;
        const size_t count = layer.outputs * layer.blocks;
        const Tensor of_blocks = node.constant(scales, "scales");
        if (of_blocks.type == element_float16 && of_blocks.count() == count) {
            scale_values = pack_block_scales(layer, static_cast<const uint16_t*>(of_blocks.data));
            give_back(of_blocks.data, count * sizeof(uint16_t));
        } else {
            scale_values = pack_block_scales(layer, floats(node, scales, "scales", count));
        }
        layer.scales = reinterpret_cast<const float*>(scale_values.data());
    }

    void set_shape(const Node& node, size_t inputs, size_t outputs) {
        if (inputs < 1 || outputs < 1 || inputs > most_inputs)
            node.refuse("weight has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) +
                        " outputs; both have to be at least 1, and inputs at most " + std::to_string(most_inputs));
        layer.inputs = inputs;
        layer.outputs = outputs;
        layer.block = layer.padded_inputs = round_up(inputs, input_padding);
    }

    const float* floats(const Node& node, Input index, const char* input, size_t count) const {
        const Tensor given = node.constant(index, input);
        if (given.type != element_float || given.count() != count)
            node.refuse(std::string(input) + " is " + describe(given) + "; it has to be float of " + std::to_string(count) +
                        " elements");
        return given.floats();
    }

    const float* optional_floats(const Node& node, Input index, const char* input, size_t count, Lines& kept) const {
        if (!node.has_input(index))
            return nullptr;
        kept = pad(floats(node, index, input, count), count);
        return reinterpret_cast<const float*>(kept.data());
    }

    const Path& path;
    const Product& product;
    const std::string name;
    const Parts parts;
    Layer layer{};
    bool has_residual;
    Lines weights, scale_values, bias_values, norm_weights, norm_biases;
};

}  // namespace

LinearOperator::LinearOperator(const Runtime& runtime, const Path& path, Weights weights)
    : runtime(runtime),
      path(path),
      weights(weights),
      product(weights == Weights::bytes ? path.bytes : weights == Weights::nibbles ? path.nibbles : path.floats),
      name(weights == Weights::bytes ? "Linear" : weights == Weights::nibbles ? "Linear4" : "Linear32") {
    describe_operator<LinearOperator, LinearKernel>(*this);
    GetInputType = [](const OrtCustomOp* op, size_t index) {
        const Weights weights = static_cast<const LinearOperator*>(op)->weights;
        if (index >= adapters)
            return element_int64;
        if (index == scales && weights == Weights::nibbles)
            return element_any;  // float or float16
        if (index != weight || weights == Weights::floats)
            return element_float;
        return weights == Weights::nibbles ? element_uint8 : element_int8;
    };
    GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return input_count; };
    GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) {
        const bool has_scales = static_cast<const LinearOperator*>(op)->weights != Weights::floats;
        return index <= weight || (index == scales && has_scales) ? required : optional;
    };
}

}  // namespace kvasir
