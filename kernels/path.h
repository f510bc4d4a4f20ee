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

// An adapter's part of a layer: out [first, first + width) += x A B, for A [inputs][padded_rank] and B [rank][width].
struct LowRank {
    const void* a;  // zeros beyond rank; null where the adapter has no such part
    const void* b;
    size_t rank, padded_rank, first, width;
    bool is_16;  // the upper 16 bits of floats, else floats
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

    // Rows [m, last) of one adapter: x A into h, whose row m begins at h + m * stride; then h B is added to columns
    // [column, end), which are among the adapter's, of out, whose row m begins at out + m * out_stride.
    void (*project)(const LowRank&, const FloatRows& x, size_t m, size_t last, float* h, size_t stride);
    void (*expand)(const LowRank&, const float* h, size_t stride, size_t m, size_t last, size_t column, size_t end,
                   float* out, size_t out_stride);
};

extern const Path scalar_path;
#if defined(__x86_64__)
extern const Path avx2_path;
extern const Path avx512_path;
#elif defined(__aarch64__)
extern const Path neon_path;
#endif

}  // namespace kvasir
