// The path without vector instructions: what the others are compared with, and the last resort.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layer.h"

namespace kvasir::scalar {
#include "lanes_scalar.h"
#include "product_scalar.h"
//
#include "linear.h"
}  // namespace kvasir::scalar

namespace kvasir {
const Path scalar_path = {"scalar", scalar::product<scalar::BytesProduct>(), scalar::product<scalar::NibblesProduct>()};
}
