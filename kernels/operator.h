// What all operators tell ONNX Runtime alike.
#pragma once

#include "run.h"

namespace kvasir {

// Fill in an operator's functions, but for the number of its inputs: those and its output are floats. An Operator has
// runtime and name; a Kernel, made of it and a Node, has runtime and compute.
template <class Operator, class Kernel>
void describe_operator(OrtCustomOp& op) {
    op.GetName = [](const OrtCustomOp* self) -> const char* { return static_cast<const Operator*>(self)->name; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };  // where the provider has its memory
    op.GetInputType = [](const OrtCustomOp*, size_t) { return element_float; };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return required; };
    op.GetOutputType = [](const OrtCustomOp*, size_t) { return element_float; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return required; };
    op.CreateKernelV2 = [](const OrtCustomOp* given, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
        const auto& self = *static_cast<const Operator*>(given);
        return guarded(self.runtime, [&] { *kernel = new Kernel(self, Node(self.runtime, info, self.name)); });
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
        const auto& self = *static_cast<const Kernel*>(kernel);
        return guarded(self.runtime, [&] { self.compute(Run(self.runtime, context)); });
    };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

}  // namespace kvasir
