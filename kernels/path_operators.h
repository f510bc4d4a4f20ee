// Operators that are no more than a kernel on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct PathOperator : OrtCustomOp {
    PathOperator(const Runtime& runtime, const Path& path, const char* name) : runtime(runtime), path(path), name(name) {}

    const Runtime& runtime;
    const Path& path;
    const char* const name;
};

PathOperator activation_operator(const Runtime&, const Path&);
PathOperator norm_operator(const Runtime&, const Path&);
PathOperator head_linear_operator(const Runtime&, const Path&);
PathOperator convolution_operator(const Runtime&, const Path&);
PathOperator memory_operator(const Runtime&, const Path&);

}  // namespace kvasir
