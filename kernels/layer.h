// A linear layer and the table of functions that compute it, which each instruction set fills in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

constexpr size_t lane_count = 16;
constexpr size_t tile_columns = 64;  // packed weights are padded to whole tiles
constexpr size_t input_padding = 64;  // and to whole cache lines of inputs
constexpr size_t row_padding = 16;  // room for rounded rows is a multiple of this
constexpr size_t nibble_block = 32;  // inputs that share a scale in weights of 4 bits
constexpr size_t mixed_parts = 8;

// |q| <= 127 and |w| <= 128, so a sum of this many products fits int32.
constexpr size_t most_inputs = 131'072;

enum class Norm { none, rms, layer, l2, softmax };
enum class Activation { none, silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid, tanh, exp, softplus };

struct Layer {
    size_t inputs;   // K
    size_t outputs;  // N
    size_t padded_inputs;
    size_t block;   // inputs that share a scale of activations
    size_t blocks;  // the last one may be shorter
    Activation activation;
    bool gated;
    float limit;  // of a gate, and of the size of what it gates, to which 1 is then added; 0 is none
    Norm norm;
    float epsilon;
    bool mixed;  // K is a multiple of mixed_parts
    const float* norm_weight;  // [K], or null for ones
    const float* norm_bias;    // [K], or null
    const uint8_t* weights;    // packed: kernels/README.md draws it
    const float* scales;       // int8: [N]; 4 bits: [N / 16][blocks][16]; N padded to tiles; floats have none
    const float* bias;         // [N], padded, or null

    size_t row_width() const { return gated ? 2 * inputs : inputs; }
};

// Inputs rounded to int8: row m, block b has the values q * scales[m][b]. Of floats the values alone.
struct RoundedRows {
    void* values;   // [M, padded][padded_inputs] of Product::input_bytes each; padding of inputs is 0
    float* scales;  // [M][blocks]
    int32_t* excess;  // [M][blocks]: the sum of q, times Product::zero_point
};

// The functions for one format of weights on one instruction set.
struct Product {
    size_t input_bytes;  // of a prepared input: 4 of floats, 1 of integers, or 2 where products need 16 bits
    int zero_point;      // added to weights when they are packed, to make them unsigned

    // Compute and, for integers, round row m from x [row_width]; y is room for padded_inputs floats.
    void (*prepare)(const Layer&, const float* x, float* y, const RoundedRows&, size_t m);

    // Compute columns [column, column + tile_columns) of rows [first, last) into out [M][N];
    // residual [M][N] may be null.
    void (*multiply)(const Layer&, const RoundedRows&, size_t first, size_t last, size_t column, const float* residual,
                     float* out);
};

}  // namespace kvasir
