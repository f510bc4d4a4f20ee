// The functions of all operators on one instruction set.
#pragma once

#include "heads.h"
#include "layer.h"

namespace kvasir {

struct Path {
    const char* name;
    Product bytes;    // weights of int8
    Product nibbles;  // weights of 4 bits
    Attention attention;

    // The norm of a layer: y [inputs] of x [inputs].
    void (*normalise)(const Layer&, const float* x, float* y);
};

extern const Path scalar_path;
#if defined(__x86_64__)
extern const Path avx2_path;
extern const Path avx512_path;
#elif defined(__aarch64__)
extern const Path neon_path;
#endif

}  // namespace kvasir
