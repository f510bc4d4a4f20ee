// The operator kvasir.Norm, on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct NormOperator : OrtCustomOp {
    NormOperator(const Runtime&, const Path&);

    const Runtime& runtime;
    const Path& path;
    static constexpr const char* name = "Norm";
};

}  // namespace kvasir
