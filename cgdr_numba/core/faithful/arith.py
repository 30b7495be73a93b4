"""The two open questions about the NPU's vector unit, as switches that every vector operation obeys."""

from typing import NamedTuple

import numpy as np

from cgdr_numba.core.dtypes import F32_MAX
from cgdr_numba.core.faithful.fma import fma
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)


class Arith(NamedTuple):
    """How the vector unit rounds and overflows; plain booleans, so that kernels take it as it is."""

    fused: bool
    """Axpy rounds once (True) or after the product and after the sum (False)."""
    saturate: bool
    """Overflow gives the largest finite number and NaN gives 0 (True), or infinity and NaN stay (False)."""


@kernel
def settle(x: np.float32, arith: Arith) -> np.float32:
    """Return what the vector unit stores for x: x itself, or saturated."""
    if arith.saturate:
        if x != x:
            return _ZERO
        if x > F32_MAX:
            return F32_MAX
        if x < -F32_MAX:
            return -F32_MAX
    return x


@kernel
def multiply_add(y: np.float32, a: np.float32, x: np.float32, arith: Arith) -> np.float32:
    """Return one lane of Axpy: fl(y + fl(a x)), or fl(y + a x) where fused."""
    if arith.fused:
        return settle(fma(a, x, y), arith)
    return settle(y + settle(a * x, arith), arith)
