// One run of a node: its values, and the session's threads.
#pragma once

#include "node.h"

namespace kvasir {

class Run {
public:
    Run(const Runtime& runtime, OrtKernelContext* context) : runtime(runtime), context(context) {}

    Tensor input(size_t index) const {
        const OrtValue* value = nullptr;
        check(runtime.KernelContext_GetInput(context, index, &value));
        return tensor_of(runtime, value);
    }

    // Room for an output, which is an input's where the caller bound both to one address.
    template <class Value>
    Value* output(size_t index, const Shape& shape) const {
        OrtValue* value = nullptr;
        void* data = nullptr;
        check(runtime.KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
        if (!value)
            throw Refusal("output " + std::to_string(index) + " has no name, and the operator has to write it");
        check(runtime.GetTensorMutableData(value, &data));
        return static_cast<Value*>(data);
    }

    // Call work(0) to work(tasks - 1) on the session's threads, which take the next task or, of 0 batches, an equal share.
    template <class Work>
    void in_parallel(size_t tasks, Work work, size_t batches = 0) const {
        if (tasks == 1)
            return work(0);
        const auto call = [](void* data, size_t task) { (*static_cast<Work*>(data))(task); };
        check(runtime.KernelContext_ParallelFor(context, call, tasks, batches, &work));
    }

    // Call work(0) to work(count - 1), each of so many multiplications, in tasks that are worth a thread.
    template <class Work>
    void in_shares(size_t count, size_t multiplications, const Work& work) const {
        const size_t step = (1 << 13) / (multiplications + 1) + 1;
        if (count)
            in_parallel((count + step - 1) / step, [&](size_t task) {
                for (size_t i = task * step; i < count && i < (task + 1) * step; ++i)
                    work(i);
            });
    }

private:
    const Runtime& runtime;
    OrtKernelContext* const context;
};

}  // namespace kvasir
