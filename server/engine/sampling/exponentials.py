"""Powers and logarithms with the same bits on every CPU.

Those of NumPy and of C libraries differ in their last bits between CPUs. Sums, products and
quotients of arrays are rounded correctly by every CPU, and NumPy fuses none of them. Its sums and
running sums add in an order that depends on shapes alone; those of `einsum` and `dot` do not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LOG2_E = 1.4426950408889634
_LEAST = np.float32(-125)
_TO_INTEGER = np.float32(1.5 * 2**23)  # a float plus this is an integer, in its lowest bits
# 2^x is nearly (a + B x) / (a - B x) of a = x^2 + A, which is 1 + 2 B / (x + A / x - B). These two
# have the least error of all such quotients for x from -0.5 to 0.5, relative to 2^x: 4.4e-7.
_A, _B = np.float32(25.039107), np.float32(8.677839)
# Of log in FDLIBM (Sun Microsystems, 1993), e_log.c: ln 2 in two parts, and Lg7 to Lg1.
_LN_2_HIGH, _LN_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)


def exp2(exponents: NDArray[np.float32]) -> None:
    """Replace exponents of at most 0 by powers of 2, with a relative error below 7e-7.

    Those below -125, as that of a banned token, become 0.
    """
    x = exponents
    has_zeros = x.min() < _LEAST
    y = np.full_like(x, _LEAST) if has_zeros else np.empty_like(x)
    if has_zeros:
        np.maximum(x, y, out=x)  # three times as fast as with a scalar
    rounded = x + _TO_INTEGER
    x -= np.subtract(rounded, _TO_INTEGER, out=y)
    with np.errstate(divide="ignore", over="ignore"):  # where x is 0 or nearly so, 2^x is 1
        np.divide(_A, x, out=y)
    y += x
    y -= _B
    np.divide(2 * _B, y, out=y)
    np.add(y, np.float32(1), out=x)
    bits, power = rounded.view(np.int32), x.view(np.int32)
    bits <<= 23  # what a float's bits grow by when it is multiplied by the power of the integer
    power += bits
    if has_zeros:
        x -= np.float32(2.0**-125)


def log(x: float) -> float:
    """Return the natural logarithm of a number above 0, within 1 ulp."""
    mantissa, exponent = math.frexp(x)
    if mantissa < math.sqrt(0.5):
        mantissa, exponent = 2 * mantissa, exponent - 1
    f = mantissa - 1
    s = f / (2 + f)
    z, r = s * s, 0.0
    for coefficient in _LG:
        r = z * (coefficient + r)
    half = 0.5 * f * f
    return exponent * _LN_2_HIGH - ((half - (s * (half + r) + exponent * _LN_2_LOW)) - f)
