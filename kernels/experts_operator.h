// The operators kvasir.Experts, kvasir.Experts4 and kvasir.Experts32, on one path.
#pragma once

#include "linear_operator.h"

namespace kvasir {

struct ExpertsOperator : OrtCustomOp {
    ExpertsOperator(const Runtime&, const Path&, Weights);

    const Runtime& runtime;
    const Weights weights;
    const Product& product;
    const char* const name;
};

}  // namespace kvasir
