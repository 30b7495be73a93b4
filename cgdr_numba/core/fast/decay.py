"""Gates of a chunk: their running sums in float64, and the decays between tokens that come out of differences.

A sum of float32 gates in float64 keeps what gates of -300 and of -0.001 have in common; the exp is taken of what is
kept only. Gates below -1000 count as -1000: either leaves nothing in float32.
"""

from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.dtypes import F32_MAX, widen
from cgdr_numba.core.fast.simd import INDEX, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
Words = NDArray[np.uint16]

LOWEST_GATE: Final = -1000.0
HIGHEST_RISE: Final = 10.0
"""What positive gates of a chunk may add up to: no decay between two tokens exceeds e^10."""
HIGHEST_BETA: Final = np.float32(2.0**10)
LOWEST_FACTOR: Final = -60.0
"""Smallest sum of a chunk down to which e^G and e^-G are normal numbers, and decays are their products."""

_F32_MAX: Final = np.float64(F32_MAX)
_LOG2_E: Final = 1.4426950408889634
_LN2: Final = 0.6931471805599453
# Adding 1.5 * 2^52 puts the nearest integer into the last bits.
_ROUNDER: Final = 6755399441055744.0


class Gates(NamedTuple):
    """Rows of one value head's chunk."""

    sums: F64Array
    """[C]; G, the running sums of g."""
    beta: F32Array
    """[C]"""
    decay: F32Array
    """[C]; e^G, what is left of the chunk's initial state."""
    pull: F32Array
    """[C]; beta e^G."""
    rest: F32Array
    """[C]; e^(G_last - G), what is left of a token at the chunk's end."""
    growth: F32Array
    """[C]; e^-G where all sums are within the range of factors."""


@kernel
def exp32(x: float) -> np.float32:
    """Return e^x for x <= 80 within an ulp of float32; 0 below -700."""
    t = x if x > -700.0 else -700.0
    n = t * _LOG2_E + _ROUNDER
    r = t - (n - _ROUNDER) * _LN2
    p = 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = np.int64((np.float64(n).view(np.int64) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return np.float32(p * power)


@kernel
def load_gates(g: Words, beta: Words, kinds: tuple[int, int], gates: Gates) -> bool:
    """Fill all rows from g and beta [r, w]; returns whether decays may be taken from differences of the sums.

    They may where all numbers are finite, and so small that nothing between tokens gets far from what is computed.
    """
    n, total, rise, n_bad = g.shape[0], 0.0, 0.0, 0
    for i in range(n):
        value = np.float64(widen(g[i], kinds[0]))
        n_bad += 0 if abs(value) <= _F32_MAX else 1
        rise += value if value > 0.0 else 0.0
        total += value if value > LOWEST_GATE else LOWEST_GATE
        gates.sums[i] = total
        weight = widen(beta[i], kinds[1])
        n_bad += 0 if abs(weight) <= HIGHEST_BETA else 1
        gates.beta[i] = weight
    if n_bad > 0 or not rise <= HIGHEST_RISE:
        return False
    for i in range(n):
        gates.decay[i] = exp32(gates.sums[i])
        gates.pull[i] = gates.beta[i] * gates.decay[i]
        gates.rest[i] = exp32(total - gates.sums[i])
        gates.growth[i] = exp32(-gates.sums[i] if gates.sums[i] > LOWEST_FACTOR else 0.0)
    return True


@kernel
def lowest(gates: Gates, n: int) -> float:
    """Return the smallest of the first n sums."""
    least = 0.0
    for i in range(n):
        least = min(least, gates.sums[i])
    return least


@intrinsic  # type: ignore[untyped-decorator]
def _emit_scores(_typing_context: Any, operands: Any) -> Any:
    """Rows of B and M out of (kk, qk, growth, beta, decay, b, m): D_ij = decay_i growth_j."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, values[0])
        arrays = [context.make_array(kind)(context, builder, x) for kind, x in zip(operands, parts, strict=True)]
        kk, qk, growth, beta, decay, b, m = (array.data for array in arrays)
        lanes = Lanes(builder, instruction_set().lanes)
        growths = [lanes.load(growth, INDEX(j)) for j in range(0, C, lanes.n)]
        with cgutils.for_range(builder, builder.extract_value(arrays[0].shape, 0)) as loop:
            left, factor = (lanes.splat_at(array, loop.index) for array in (decay, beta))
            row = builder.mul(loop.index, INDEX(C))
            for i, part in enumerate(growths):
                place = builder.add(row, INDEX(i * lanes.n))
                between = builder.fmul(left, part)
                written = builder.fmul(factor, builder.fmul(between, lanes.load(kk, place)))
                lanes.store(builder.fsub(lanes.zero, written), b, place)
                lanes.store(builder.fmul(between, lanes.load(qk, place)), m, place)
        return context.get_dummy_value()

    return types.void(operands), generate


@kernel
def _compiled_scores(kk: F32Array, qk: F32Array, gates: Gates, b: F32Array, m: F32Array) -> None:
    """The intrinsic behind an ordinary call."""
    _emit_scores((kk, qk, gates.growth, gates.beta, gates.decay, b, m))


def plain_scores(kk: F32Array, qk: F32Array, gates: Gates, b: F32Array, m: F32Array) -> None:
    """B and M by products of factors, by NumPy."""
    n = len(kk)
    between = gates.decay[:n, np.newaxis] * gates.growth
    b[:n], m[:n] = -(gates.beta[:n, np.newaxis] * (between * kk)), between * qk


_factored_scores = plain_scores if numba.config.DISABLE_JIT else _compiled_scores


@kernel
def decay_scores(kk: F32Array, qk: F32Array, gates: Gates, b: F32Array, m: F32Array) -> None:
    """B = -beta K K^T . D and M = Q K^T . D with D_ij = e^(G_i - G_j); above the diagonal they mean nothing.

    Reads kk, qk [r, C] and writes the same rows of b and m, all contiguous. D_ij is e^G_i e^-G_j where both are in
    range, else the exp of the difference.
    """
    n = kk.shape[0]
    if lowest(gates, n) > LOWEST_FACTOR:
        _factored_scores(kk, qk, gates, b, m)
    else:
        for i in range(n):
            for j in range(i + 1):
                between = exp32(gates.sums[i] - gates.sums[j])
                b[i, j] = -(gates.beta[i] * (between * kk[i, j]))
                m[i, j] = between * qk[i, j]
