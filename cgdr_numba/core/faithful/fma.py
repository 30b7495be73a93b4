"""Fused multiply-add in float32: the LLVM intrinsic, and its twin in plain Python."""

from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from cgdr_numba.core.jit import kernel


@intrinsic  # type: ignore[untyped-decorator]
def _llvm_fma(_typing_context: Any, _a: Any, _x: Any, _y: Any) -> Any:
    """Return a x + y rounded once, through llvm.fma.f32."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return signature, generate


def exact_fma(a: np.float32, x: np.float32, y: np.float32) -> np.float32:
    """Return a x + y rounded once, by float64 arithmetic.

    The product of two float32 is exact in float64. The sum is rounded to odd (its last bit set where anything was
    lost), which makes the second rounding, to float32, the only one that counts.
    """
    product, addend = np.float64(a) * np.float64(x), np.float64(y)
    total = product + addend
    if not np.isfinite(total):
        return np.float32(total)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    if lost != 0.0 and not bits & 1:
        # One step towards the lost part: up in magnitude where both have one sign, down where they differ.
        total = np.int64(bits + (1 if (lost > 0.0) == (total > 0.0) else -1)).view(np.float64)
    return np.float32(total)


@kernel
def _compiled_fma(a: np.float32, x: np.float32, y: np.float32) -> np.float32:
    """Return a x + y rounded once; the intrinsic behind an ordinary call."""
    return _llvm_fma(a, x, y)  # type: ignore[no-any-return]


fma = exact_fma if numba.config.DISABLE_JIT else _compiled_fma
