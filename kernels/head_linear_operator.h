// The operator kvasir.HeadLinear, on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct HeadLinearOperator : OrtCustomOp {
    HeadLinearOperator(const Runtime&, const Path&);

    const Runtime& runtime;
    const Path& path;
    static constexpr const char* name = "HeadLinear";
};

}  // namespace kvasir
