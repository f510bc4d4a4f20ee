// The path without vector instructions: what the others are compared with, and the last resort.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "path.h"

namespace kvasir::scalar {
#include "lanes_scalar.h"
#include "unrolled.h"
//
#include "product_scalar.h"
//
#include "linear.h"
//
#include "low_rank.h"
//
#include "attention.h"
#include "float_attention.h"
}  // namespace kvasir::scalar

namespace kvasir {
const Path scalar_path = {
    "scalar",
    scalar::product<scalar::BytesProduct>(),
    scalar::product<scalar::InBlocks<scalar::BytesProduct>>(),
    scalar::product<scalar::NibblesProduct>(),
    scalar::float_product<4, 1>(),
    scalar::attention<scalar::BytesProduct>(),
    scalar::float_attention<4>(),
    scalar::normalise,
    scalar::multiply_floats<4>,
    scalar::project,
    scalar::expand,
    scalar::convolve,
    scalar::remember,
    scalar::activate,
};
}
