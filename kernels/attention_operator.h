// The operators kvasir.Attention, over blocks of keys and values, and kvasir.TextAttention, over whole texts, on one path;
// and kvasir.Attention32 and kvasir.TextAttention32, whose keys and values are floats.
#pragma once

#include <vector>

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct AttentionOperator : OrtCustomOp {
    AttentionOperator(const Runtime&, const Path&, bool has_blocks, bool has_floats);

    enum Input {
        qkv, keys, key_scales, values, value_scales, starts, pasts, table, cosines, sines, slopes, sinks, biases, input_count
    };

    const Runtime& runtime;
    const Attention& attention;
    const bool has_blocks, has_floats;
    const char* const name;
    const std::vector<Input> inputs;  // in their order
};

}  // namespace kvasir
