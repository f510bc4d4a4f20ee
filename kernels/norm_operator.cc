#include "path_operators.h"

#include "memory.h"
#include "operator.h"
#include "pack.h"

namespace kvasir {

namespace {

enum Input : size_t { x, weight, bias, input_count };

class NormKernel {
public:
    NormKernel(const PathOperator& op, const Node& node) : runtime(op.runtime), path(op.path) {
        fixed.norm = node.choice<Norm>("norm", {"", "rms", "layer", "l2", "softmax"});
        if (fixed.norm == Norm::none)
            node.refuse("the attribute norm has to be there");
        if (fixed.norm == Norm::softmax && (node.has_input(weight) || node.has_input(bias)))
            node.refuse("a softmax has no weight and no bias");
        fixed.epsilon = node.number("epsilon", -1.0f);
        if (fixed.norm != Norm::softmax && !(fixed.epsilon >= 0.0f))
            node.refuse("the attribute epsilon has to be there, and at least 0");
        fixed.norm_weight = floats(node, weight, "weight", weights);
        fixed.norm_bias = floats(node, bias, "bias", biases);
    }

    void compute(const Run& run) const {
        const Tensor input = run.input(x);
        Layer layer = fixed;
        layer.inputs = input.shape.empty() ? 0 : size_t(input.shape.back());
        if (layer.inputs < 1 || (width && layer.inputs != width))
            throw Refusal(std::string("kvasir.Norm") + ": x is " + describe(input) + "; its last dimension has to be " +
                          (width ? std::to_string(width) : "at least 1"));
        const float* const from = input.floats();
        float* const to = run.output<float>(0, input.shape);
        run.in_shares(input.count() / layer.inputs, layer.inputs, [&](size_t row) {
            path.normalise(layer, from + row * layer.inputs, to + row * layer.inputs);
        });
    }

    const Runtime& runtime;

private:
    const float* floats(const Node& node, Input index, const char* input, Lines& kept) {
        if (!node.has_input(index))
            return nullptr;
        const Tensor given = node.constant(index, input);
        if (given.type != element_float || given.shape.size() != 1 || given.count() < 1 || (width && given.count() != width))
            node.refuse(std::string(input) + " is " + describe(given) + "; it has to be float of one dimension" +
                        (width ? ", of " + std::to_string(width) + " elements" : ""));
        width = given.count();
        kept = pad(given.floats(), width);
        return reinterpret_cast<const float*>(kept.data());
    }

    const Path& path;
    Layer fixed{};     // but for the inputs, which those of a run say
    size_t width = 0;  // of x, where it is known
    Lines weights, biases;
};

}  // namespace

PathOperator norm_operator(const Runtime& runtime, const Path& path) {
    PathOperator op(runtime, path, "Norm");
    describe_operator<PathOperator, NormKernel>(op);
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return input_count; };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return index == x ? required : optional; };
    return op;
}

}  // namespace kvasir
