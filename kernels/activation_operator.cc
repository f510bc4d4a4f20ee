#include "path_operators.h"

#include <algorithm>

#include "operator.h"

namespace kvasir {

namespace {

constexpr size_t task_elements = 1024;

class ActivationKernel {
public:
    ActivationKernel(const PathOperator& op, const Node& node) : runtime(op.runtime), path(op.path) {
        layer.activation = node.choice<Activation>("activation", {"", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2",
                                                          "sigmoid", "tanh", "exp", "softplus"});
        if (layer.activation == Activation::none)
            node.refuse("the attribute activation has to be there");
    }

    void compute(const Run& run) const {
        const Tensor input = run.input(0);
        const size_t count = input.count();
        const float* const from = input.floats();
        float* const to = run.output<float>(0, input.shape);
        run.in_shares((count + task_elements - 1) / task_elements, 16 * task_elements, [&](size_t task) {
            const size_t first = task * task_elements;
            Layer part = layer;
            part.inputs = std::min(task_elements, count - first);
            path.activate(part, from + first, to + first);
        });
    }

    const Runtime& runtime;

private:
    const Path& path;
    Layer layer{};
};

}  // namespace

PathOperator activation_operator(const Runtime& runtime, const Path& path) {
    PathOperator op(runtime, path, "Activation");
    describe_operator<PathOperator, ActivationKernel>(op);
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    return op;
}

}  // namespace kvasir
