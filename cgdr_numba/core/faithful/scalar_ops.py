"""The scalar unit: plain float32 arithmetic, never saturated, and the software exponential."""

from typing import Final

import numpy as np

from cgdr_numba.core.jit import kernel

TAYLOR_TERMS: Final = 12
"""Terms of the exponential's series after the 1."""
MAX_HALVINGS: Final = 130
"""Halvings at the most: any finite float32 needs fewer. The NPU has no cap and would not end on infinity."""

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)


@kernel
def scalar_exp(x: np.float32) -> np.float32:
    """Return ScalarExp(x): halve |x| down to 1, Taylor series of 12 terms, square back, reciprocal where x < 0.

    The relative error doubles with every halving. +inf gives inf and -inf gives 0, a declared deviation: the NPU's
    loop would not end. NaN stays NaN; 0 gives exactly 1.
    """
    reduced = x if x >= _ZERO else -x
    halvings = 0
    while reduced > _ONE and halvings < MAX_HALVINGS:
        reduced = reduced * _HALF
        halvings += 1
    term = _ONE
    result = _ONE
    for i in range(1, TAYLOR_TERMS + 1):
        term = term * (reduced / np.float32(i))
        result = result + term
    for _ in range(halvings):
        result = result * result
    if x < _ZERO:
        result = _ONE / result
    return result
