// The path for AVX2 with FMA: Intel from Haswell, AMD from Zen.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "path.h"

// As in path_avx512.cc: nothing of the standard library may follow.
#pragma GCC target("avx2,fma")

namespace kvasir::avx2 {
#include "lanes_avx2.h"
#include "unrolled.h"
#include "product_avx2.h"
//
#include "linear.h"
//
#include "low_rank.h"
//
#include "attention.h"
#include "float_attention.h"
}  // namespace kvasir::avx2

namespace kvasir {
const Path avx2_path = {
    "avx2",
    avx2::product<avx2::BytesProduct>(),
    avx2::product<avx2::InBlocks<avx2::BytesProduct>>(),
    avx2::product<avx2::NibblesProduct>(),
    avx2::float_product<6, 1>(),
    avx2::attention<avx2::BytesProduct>(),
    avx2::float_attention<6>(),
    avx2::normalise,
    avx2::multiply_floats<4>,
    avx2::project,
    avx2::expand,
    avx2::convolve,
    avx2::remember,
    avx2::activate,
};
}

#endif
