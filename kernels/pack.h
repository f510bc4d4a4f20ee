// Weights and their scales in the order in which products read them; kernels/README.md draws it.
#pragma once

#include "layer.h"
#include "memory.h"

namespace kvasir {

// int8 weights, [K, N], or [N, K] if transposed.
Lines pack_bytes(const Layer&, const int8_t* weights, bool transposed, int zero_point);

// Float weights, [K, N], or [N, K] if transposed, as [N / 16][K][16].
Lines pack_floats(const Layer&, const float* weights, bool transposed);

// Weights of 4 bits [N, K / 32, 16], the low nibble first.
Lines pack_nibbles(const Layer&, const uint8_t* weights);

// Scales of blocks [N, K / 32], floats or float16, as floats [N / 16][K / 32][16].
Lines pack_block_scales(const Layer&, const float* scales);
Lines pack_block_scales(const Layer&, const uint16_t* scales);

// A vector of floats, padded with zeros to a whole number of tiles.
Lines pad(const float* values, size_t count);

}  // namespace kvasir
