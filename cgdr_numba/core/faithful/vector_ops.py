"""The vector unit's vocabulary, on rows of 2-D slices. Plain Python that also runs with NUMBA_DISABLE_JIT=1.

Every operation is element-wise float32 with the rounding of `Arith`; those that stand for several instructions in a
row say which, and keep their order.
"""

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import BF16, BF16_MAX, FP16, HALF_MAX, narrow
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.faithful.arith import Arith, multiply_add, settle
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

REDUCE_LANES = 64
"""Products that one WholeReduceSum repeat adds up."""
REDUCE_STRIDE = 8
"""Distance of the partial sums that it writes: one 32-byte block."""

_ZERO = np.float32(0.0)
_exp64 = kernel(exp64)


@kernel
def duplicate(y: F32Array, i: int, value: np.float32, n: int) -> None:
    """Duplicate: y[i, :n] = value."""
    for lane in range(n):
        y[i, lane] = value


@kernel
def muls(y: F32Array, i: int, x: F32Array, factor: np.float32, n: int, arith: Arith | None) -> None:
    """Muls: y[i, :n] = fl(x[i, :n] * factor); y may be x."""
    for lane in range(n):
        y[i, lane] = settle(x[i, lane] * factor, arith)


@kernel
def add(y: F32Array, i: int, x: F32Array, n: int, arith: Arith | None) -> None:
    """Add: y[i, :n] = fl(x[i, :n] + y[i, :n])."""
    for lane in range(n):
        y[i, lane] = settle(x[i, lane] + y[i, lane], arith)


@kernel
def sub(y: F32Array, i: int, x: F32Array, n: int, arith: Arith | None) -> None:
    """Sub: y[i, :n] = fl(y[i, :n] - x[0, :n])."""
    for lane in range(n):
        y[i, lane] = settle(y[i, lane] - x[0, lane], arith)


@kernel
def exp32(x: np.float32) -> np.float32:
    """Return one lane of Exp: the float32 nearest to e^x computed in float64."""
    return np.float32(_exp64(np.float64(x)))


@kernel
def exp(y: F32Array, i: int, x: F32Array, n: int, arith: Arith | None) -> None:
    """Exp: y[i, :n] = e^x[0, :n]."""
    for lane in range(n):
        y[i, lane] = settle(exp32(x[0, lane]), arith)


@kernel
def axpy_chain(y: F32Array, i: int, a: F32Array, x: F32Array, n: int, arith: Arith | None) -> None:
    """len(a) Axpy instructions: y[i, :n] += a[k] * x[k, :n] for k ascending, one rounding sequence a lane."""
    for k in range(len(a)):
        factor = a[k]
        for lane in range(n):
            y[i, lane] = multiply_add(y[i, lane], factor, x[k, lane], arith)


@kernel
def axpy_prefixes(y: F32Array, i: int, a: F32Array, arith: Arith | None) -> None:
    """Axpy instructions of growing width within one matrix: y[i, :k] += a[k] * y[k, :k] for k = 1 .. i - 1."""
    for k in range(1, i):
        for lane in range(k):
            y[i, lane] = multiply_add(y[i, lane], a[k], y[k, lane], arith)


@kernel
def axpy_outer(y: F32Array, a: F32Array, x: F32Array, i: int, arith: Arith | None) -> None:
    """len(a) Axpy instructions: y[d, :] += a[d] * x[i, :] for d ascending."""
    for d in range(len(a)):
        for lane in range(y.shape[1]):
            y[d, lane] = multiply_add(y[d, lane], a[d], x[i, lane], arith)


@kernel
def whole_reduce_sum(x: F32Array, n_repeats: int, arith: Arith | None) -> None:
    """WholeReduceSum in place: x[8 r] = sum of x[64 r : 64 r + 64] by a binary tree of adjacent pairs.

    Repeats run in order, so a partial sum only lands in lanes that an earlier repeat, or this one, has consumed.
    """
    for r in range(n_repeats):
        begin = r * REDUCE_LANES
        width = REDUCE_LANES
        while width > 1:
            width = width // 2
            for lane in range(width):
                x[begin + lane] = settle(x[begin + 2 * lane] + x[begin + 2 * lane + 1], arith)
        x[r * REDUCE_STRIDE] = x[begin]


@kernel
def dot(a: F32Array, b: F32Array, scratch: F32Array, arith: Arith | None) -> np.float32:
    """DotFp32: products, WholeReduceSum of every full group of 64, then the scalar unit adds groups and tail in order.

    `scratch` is the dot slice. The scalar sums are not saturated.
    """
    n = len(a)
    for lane in range(n):
        scratch[lane] = settle(a[lane] * b[lane], arith)
    n_repeats = n // REDUCE_LANES
    whole_reduce_sum(scratch, n_repeats, arith)
    total = _ZERO
    for r in range(n_repeats):
        total = total + scratch[r * REDUCE_STRIDE]
    for lane in range(n_repeats * REDUCE_LANES, n):
        total = total + scratch[lane]
    return total


@kernel
def cast_out(value: np.float32, kind: int, words: NDArray[np.uint16], arith: Arith | None) -> None:
    """Cast (CAST_NONE) of one lane to the output dtype: nearest even; saturating casts clamp and turn NaN into 0."""
    if arith is not None:
        value = settle(value, arith)
        if arith.saturate and kind in (FP16, BF16):
            limit = HALF_MAX if kind == FP16 else BF16_MAX
            value = min(max(value, -limit), limit)
    narrow(value, kind, words)
