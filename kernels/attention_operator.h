// The operators kvasir.Attention, over blocks of keys and values, and kvasir.TextAttention, over whole texts, on one path;
// and kvasir.Attention32, kvasir.TextAttention32 and kvasir.RowAttention, whose keys and values are floats, and
// kvasir.RowAttention8.
#pragma once

#include <vector>

#include "ort_abi.h"
#include "path.h"

namespace kvasir {

struct AttentionOperator : OrtCustomOp {
    enum Kind { blocks, float_blocks, texts, float_texts, float_rows, byte_rows };

    AttentionOperator(const Runtime&, const Path&, Kind);

    enum Input {
        qkv, keys, key_scales, values, value_scales, starts, pasts, table, ends, cosines, sines, slopes, sinks, biases, input_count
    };

    const Runtime& runtime;
    const Attention& attention;
    const bool has_blocks, has_rows, has_floats;
    const bool has_caches;  // of blocks or rows, which are inputs
    const char* const name;
    const std::vector<Input> inputs;  // in their order
};

}  // namespace kvasir
