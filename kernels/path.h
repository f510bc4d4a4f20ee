// The functions of all operators on one instruction set.
#pragma once

#include "heads.h"
#include "layer.h"

namespace kvasir {

// Rows of floats: row m begins at x + m * stride.
struct FloatRows {
    const float* x;
    size_t stride, inputs;
};

struct Path {
    const char* name;
    Product bytes;    // weights of int8
    Product nibbles;  // weights of 4 bits
    Attention attention;

    // The norm of a layer: y [inputs] of x [inputs].
    void (*normalise)(const Layer&, const float* x, float* y);

    // Multiply rows [first, last) by weights [inputs][outputs] into out, whose row m begins at out + m * stride.
    void (*multiply_floats)(const FloatRows&, size_t first, size_t last, const float* weights, size_t outputs, float* out,
                            size_t stride);
};

extern const Path scalar_path;
#if defined(__x86_64__)
extern const Path avx2_path;
extern const Path avx512_path;
#elif defined(__aarch64__)
extern const Path neon_path;
#endif

}  // namespace kvasir
