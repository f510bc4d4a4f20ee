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

// An adapter's part of a layer: out [first, first + width) += x A B, for A [inputs][padded_rank].
struct LowRank {
    const void* a;  // zeros beyond rank; null where the adapter has no such part
    const void* b;  // [width / 16, rounded up][rank][16]: panels of columns
    size_t rank, padded_rank, first, width;
    bool is_16;  // the upper 16 bits of floats, else floats
};

struct Convolution {
    size_t channels, kernel, padded_channels;
    const float* weights;  // [kernel][padded_channels]
    const float* bias;     // [padded_channels], or null
    bool silu;
};

constexpr size_t most_keys = 512;

struct Memory {
    size_t heads, keys, values;  // a head's matrix is [keys][values]
    float scale;                 // of what is read
    size_t decays;               // of a token and head: 1, or one for each key
};

// What a row's tokens tell the matrices, one behind the other: [heads][keys], [heads][values], [heads][decays] or [heads].
struct Told {
    const float *query, *key, *value, *decay, *rate;  // of decays the logarithm; rates may be null
};

struct Path {
    const char* name;
    Product bytes;        // weights of int8
    Product block_bytes;  // the same with a scale for each block of weights
    Product nibbles;      // weights of 4 bits
    Product floats;       // weights of floats
    Attention attention;        // keys and values of 8 bits
    Attention float_attention;  // of floats

    // The norm of a layer: y [inputs] of x [inputs].
    void (*normalise)(const Layer&, const float* x, float* y);

    // Multiply rows [first, last) by weights [inputs][outputs] into out, whose row m begins at out + m * stride.
    void (*multiply_floats)(const FloatRows&, size_t first, size_t last, const float* weights, size_t outputs, float* out,
                            size_t stride);

    // One or two rows of one adapter: x A into h, whose second row is at h + stride; then h B is added to columns
    // [column, end) of out, whose second row is at out + stride. column - first is a multiple of 16.
    void (*project)(const LowRank&, const FloatRows& x, size_t count, float* h, size_t stride);
    void (*expand)(const LowRank&, const FloatRows& h, size_t count, size_t column, size_t end, float* out, size_t stride);

    // Channels [channel, channel + 16) of a row's tokens [tokens][channels], after those of past [kernel - 1][channels].
    void (*convolve)(const Convolution&, const float* past, const float* x, size_t tokens, size_t channel, float* y);

    // Columns [column, column + 16) of a head's matrix, and of what a row's tokens read [tokens][heads][values].
    void (*remember)(const Memory&, const Told&, size_t tokens, size_t head, size_t column, float* matrix, float* read);

    // The activation of a layer: y [inputs] of x [inputs].
    void (*activate)(const Layer&, const float* x, float* y);
};

extern const Path scalar_path;
#if defined(__x86_64__)
extern const Path avx2_path;
extern const Path avx512_path, amx_path;
#elif defined(__aarch64__)
extern const Path neon_path;
#endif

}  // namespace kvasir
