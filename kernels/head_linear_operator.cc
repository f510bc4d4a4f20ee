#include "path_operators.h"

#include <algorithm>

#include "operator.h"

namespace kvasir {

namespace {

enum Input : size_t { x, weight, input_count };

constexpr size_t task_rows = 32;

class HeadLinearKernel {
public:
    HeadLinearKernel(const PathOperator& op, const Node&) : runtime(op.runtime), path(op.path) {}

    void compute(const Run& run) const {
        const Tensor given = run.input(x), matrices = run.input(weight);
        Shape shape = given.shape;
        const Shape& sizes = matrices.shape;
        if (sizes.size() != 3 || sizes[1] < 1 || shape.size() < 2 ||
            !std::equal(sizes.begin(), sizes.end() - 1, shape.end() - 2))
            throw Refusal("kvasir.HeadLinear: weight is " + describe(matrices) + " and x " + describe(given) +
                          "; they have to be float [heads, inputs, outputs] and [..., heads, inputs], inputs at least 1");
        const size_t heads = size_t(sizes[0]), inputs = size_t(sizes[1]), outputs = size_t(sizes[2]);
        shape.back() = sizes[2];
        const float* const from = given.floats();
        float* const to = run.output<float>(0, shape);
        const size_t rows = given.count() / std::max<size_t>(heads * inputs, 1);
        if (rows)
            run.in_parallel((rows + task_rows - 1) / task_rows * heads, [&](size_t task) {
                const size_t head = task % heads, first = task / heads * task_rows;
                path.multiply_floats({from + head * inputs, heads * inputs, inputs}, first, std::min(rows, first + task_rows),
                                     matrices.floats() + head * inputs * outputs, outputs, to + head * outputs,
                                     heads * outputs);
            });
    }

    const Runtime& runtime;

private:
    const Path& path;
};

}  // namespace

PathOperator head_linear_operator(const Runtime& runtime, const Path& path) {
    PathOperator op(runtime, path, "HeadLinear");
    describe_operator<PathOperator, HeadLinearKernel>(op);
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return input_count; };
    return op;
}

}  // namespace kvasir
