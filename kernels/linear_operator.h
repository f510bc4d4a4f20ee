// The operators kvasir.Linear, kvasir.Linear4 and kvasir.Linear32, on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

enum class Weights { bytes, nibbles, floats };

struct LinearOperator : OrtCustomOp {
    LinearOperator(const Runtime&, const Path&, Weights);

    const Runtime& runtime;
    const Path& path;
    const Weights weights;
    const Product& product;
    const char* const name;
};

}  // namespace kvasir
