// The operators kvasir.Linear and kvasir.Linear4, on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct LinearOperator : OrtCustomOp {
    LinearOperator(const Runtime&, const Path&, bool has_nibbles);

    const Runtime& runtime;
    const Path& path;
    const Product& product;
    const bool has_nibbles;
    const char* const name;
};

}  // namespace kvasir
