// The operator kvasir.Attention, on one path.
#pragma once

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct AttentionOperator : OrtCustomOp {
    AttentionOperator(const Runtime&, const Path&);

    const Runtime& runtime;
    const Attention& attention;
};

}  // namespace kvasir
