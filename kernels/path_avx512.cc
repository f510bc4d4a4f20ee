// The path for AVX-512 with VNNI: Intel from Ice Lake, AMD from Zen 4. And the one for AMX, Intel from Sapphire Rapids, which
// multiplies bytes in tiles and is the same else.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "path.h"

// From here on the compiler may use these instructions: nothing of the standard library may follow, or the linker could
// take such a copy of one of its functions for the whole library.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,amx-tile,amx-int8")

namespace kvasir::avx512 {
#include "lanes_avx512.h"
#include "unrolled.h"
#include "product_avx512.h"
//
#include "linear.h"
//
#include "low_rank.h"
//
#include "attention.h"
#include "float_attention.h"
//
#include "product_amx.h"
}  // namespace kvasir::avx512

namespace kvasir {
static constexpr Path path(const char* name, Product bytes) {
    return {
        name,
        bytes,
        avx512::product<avx512::InBlocks<avx512::BytesProduct>>(),
        avx512::product<avx512::NibblesProduct>(),
        avx512::float_product<12, 2>(),
        avx512::attention<avx512::BytesProduct>(),
        avx512::float_attention<12>(),
        avx512::normalise,
        avx512::multiply_floats<4>,
        avx512::project,
        avx512::expand,
        avx512::convolve,
        avx512::remember,
        avx512::activate,
    };
}

const Path avx512_path = path("avx512", avx512::product<avx512::BytesProduct>());
const Path amx_path = path("amx", avx512::tiles_product<avx512::BytesProduct>());
}

#endif
