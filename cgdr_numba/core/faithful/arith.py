"""The two open questions about the NPU's vector unit, as switches that every vector operation obeys."""

from typing import NamedTuple

import numpy as np

from cgdr_numba.core.dtypes import F32_MAX
from cgdr_numba.core.faithful.fma import fma
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)


class Arith(NamedTuple):
    """How the vector unit rounds and overflows, where that is not the default of IEEE results and two roundings.

    Kernels take `Arith | None`. numba compiles them for each type by itself and drops the branches of the other, so
    that the default, None, has no trace of the switches.
    """

    fused: bool
    """Axpy rounds once (True) or after the product and after the sum (False)."""
    saturate: bool
    """Overflow gives the largest finite number and NaN gives 0 (True), or infinity and NaN stay (False)."""


@kernel
def settle(x: np.float32, arith: Arith | None) -> np.float32:
    """Return what the vector unit stores for x: x itself, or saturated."""
    if arith is None:
        return x
    if arith.saturate:
        if x != x:
            return _ZERO
        return min(max(x, -F32_MAX), F32_MAX)
    return x


@kernel
def multiply_add(y: np.float32, a: np.float32, x: np.float32, arith: Arith | None) -> np.float32:
    """Return one lane of Axpy: fl(y + fl(a x)), or fl(y + a x) where fused."""
    if arith is None:
        return y + a * x
    if arith.fused:
        return settle(fma(a, x, y), arith)
    return settle(y + settle(a * x, arith), arith)
