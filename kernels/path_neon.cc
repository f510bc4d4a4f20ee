// The path for 64-bit Arm with dot products of int8 (Armv8.2): Graviton from 2, Ampere Altra, Apple from M1.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "path.h"

// As in path_avx512.cc: nothing of the standard library may follow.
#pragma GCC target("arch=armv8.2-a+dotprod")

namespace kvasir::neon {
#include "lanes_neon.h"
#include "unrolled.h"
//
#include "product_neon.h"
//
#include "linear.h"
//
#include "low_rank.h"
//
#include "attention.h"
#include "float_attention.h"
}  // namespace kvasir::neon

namespace kvasir {
const Path neon_path = {
    "neon",
    neon::product<neon::BytesProduct>(),
    neon::product<neon::InBlocks<neon::BytesProduct>>(),
    neon::product<neon::NibblesProduct>(),
    neon::float_product<6, 1>(),
    neon::attention<neon::BytesProduct>(),
    neon::float_attention<6>(),
    neon::normalise,
    neon::multiply_floats<4>,
    neon::project,
    neon::expand,
    neon::convolve,
    neon::remember,
    neon::activate,
};
}

#endif
