"""exp in float64 out of plain operations, so that every machine, compiled or not, gives the same bits."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LOG2_E: Final = 1.4426950408889634
# ln 2 in two parts; the first has 21 zero bits at its end, so that n * _LN2_HIGH is exact for |n| < 2^21.
_LN2_HIGH: Final = 6.93147180369123816490e-01
_LN2_LOW: Final = 1.90821492927058770002e-10
# Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
_ROUNDER: Final = 6755399441055744.0
# Outside of this range the result is 0 or infinity whatever the argument.
_LOWEST: Final = -746.0
_HIGHEST: Final = 710.0


def exp64(x: float) -> float:
    """Return e^x: x = n ln 2 + r with |r| <= ln 2 / 2, the Taylor polynomial of degree 13 in r, times 2^n.

    Within 1 ulp of the true value. -inf gives 0, +inf gives inf, NaN stays NaN, exp64(0) is exactly 1. The 2^n is
    applied in two factors, both normal numbers.
    """
    # NaN fails both comparisons; it is put back at the end.
    t = x if x > _LOWEST else _LOWEST
    t = t if t < _HIGHEST else _HIGHEST
    n = (t * _LOG2_E + _ROUNDER) - _ROUNDER
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64(n)
    half = power >> np.int64(1)
    low = float(np.int64((half + np.int64(1023)) << np.int64(52)).view(np.float64))
    high = float(np.int64((power - half + np.int64(1023)) << np.int64(52)).view(np.float64))
    y = (p * low) * high
    return y if x == x else x


def exp64_of(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return `exp64` of every element, with its bits, by NumPy."""
    t = np.clip(np.where(np.isnan(x), 0.0, np.asarray(x, np.float64)), _LOWEST, _HIGHEST)
    n = (t * _LOG2_E + _ROUNDER) - _ROUNDER
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.full_like(r, 1.0 / 6227020800.0)
    for factorial in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1):
        p = p * r + 1.0 / factorial
    power = n.astype(np.int64)
    half = power >> 1
    low, high = (((part + 1023) << 52).view(np.float64) for part in (half, power - half))
    y: NDArray[np.float64] = np.where(np.isnan(x), x, (p * low) * high)
    return y
