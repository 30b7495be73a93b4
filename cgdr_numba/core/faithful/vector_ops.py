"""The vector unit's vocabulary, on rows of 2-D slices. Plain Python that also runs with NUMBA_DISABLE_JIT=1.

Every operation is element-wise float32 with the rounding of `Arith`; those that stand for several instructions in a
row say which, and keep their order.
"""

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import BF16, BF16_MAX, FP16, HALF_MAX, narrow
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.faithful.arith import Arith, multiply_add, settle
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS, REDUCE_LANES
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

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
    """len(a) Axpy instructions: y[i, :n] += a[k] * x[k, :n] for k ascending, one rounding sequence a lane.

    Four at a time, which keeps a lane in a register and its additions in order.
    """
    last = len(a) // 4 * 4
    for k in range(0, last, 4):
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        for lane in range(n):
            sum1 = multiply_add(y[i, lane], a0, x[k, lane], arith)
            sum2 = multiply_add(sum1, a1, x[k + 1, lane], arith)
            sum3 = multiply_add(sum2, a2, x[k + 2, lane], arith)
            y[i, lane] = multiply_add(sum3, a3, x[k + 3, lane], arith)
    for k in range(last, len(a)):
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
def transpose(x: F32Array, i: int, n_rows: int, n: int, y: F32Array) -> None:
    """Columns for `wide_dot`: y[d * DOT_COLUMNS + j] = x[i + j, d] for j < n_rows and d < n, further columns 0."""
    for j in range(n_rows):
        for d in range(n):
            y[d * DOT_COLUMNS + j] = x[i + j, d]
    for j in range(n_rows, DOT_COLUMNS):
        for d in range(n):
            y[d * DOT_COLUMNS + j] = _ZERO


@kernel
def cast_out(value: np.float32, kind: int, words: NDArray[np.uint16], arith: Arith | None) -> None:
    """Cast (CAST_NONE) of one lane to the output dtype: nearest even; saturating casts clamp and turn NaN into 0."""
    if arith is not None:
        value = settle(value, arith)
        if arith.saturate and kind in (FP16, BF16):
            limit = HALF_MAX if kind == FP16 else BF16_MAX
            value = min(max(value, -limit), limit)
    narrow(value, kind, words)
