"""Passes over a state whose channels forget by themselves: S [Dk, n], rows are key dimensions and decay one by one.

    S <- diag(a) S;   S <- S + k delta^T

A state that tokens run over lies in scratch as it is after its decay, so a token crosses it once: the pass that takes
a token in decays every element for the next token, and forms what that one asks for. Elements are rounded as the two
lines say, whatever pass they are in, and columns are chains of multiply-adds with d ascending, as in `k_first`.
"""

from typing import Any, Final

import numba
import numpy as np
from numba.core import cgutils
from numpy.typing import NDArray

from cgdr_numba.core.fast.passes import pass_intrinsic
from cgdr_numba.core.fast.simd import INDEX, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

BLOCK_VECTORS: Final = {16: 4, 8: 2, 4: 4}
"""Vectors of columns that a pass keeps in registers, by lanes: two sums and a delta each."""


def _emit(builder: Any, given: dict[str, Any]) -> None:
    """Emit a pass: full blocks of vectors, then single vectors, then single columns."""
    n_lanes = instruction_set().lanes
    begin = cgutils.alloca_once_value(builder, INDEX(0))
    for width, n_vectors in ((n_lanes, BLOCK_VECTORS[n_lanes]), (n_lanes, 1), (1, 1)):
        step = INDEX(width * n_vectors)
        left = builder.sub(given["n_columns"], builder.load(begin))
        with cgutils.for_range(builder, builder.sdiv(left, step)):
            _emit_block(builder, given, builder.load(begin), Lanes(builder, width), n_vectors)
            builder.store(builder.add(builder.load(begin), step), begin)


def _emit_block(builder: Any, given: dict[str, Any], begin: Any, lanes: Lanes, n_vectors: int) -> None:
    """Emit all rows of n_vectors * lanes.n columns from `begin` on; operands given say what the pass does."""
    places = [builder.add(begin, INDEX(i * lanes.n)) for i in range(n_vectors)]
    deltas = [lanes.load(given["delta"], place) for place in places] if "delta" in given else []
    sums = {name: [lanes.variable() for _ in places] for name in ("m", "p") if name in given}
    with cgutils.for_range(builder, given["n_rows"]) as loop:
        source = builder.mul(loop.index, given["stride"])
        target = builder.mul(loop.index, given["out_stride"])
        row = [lanes.load(given["state"], builder.add(source, place)) for place in places]
        if deltas:
            factor = lanes.splat_at(given["k"], loop.index)
            row = [lanes.multiply_add(factor, delta, value) for delta, value in zip(deltas, row, strict=True)]
        if sums:
            decay = lanes.splat_at(given["decays"], loop.index)
            row = [builder.fmul(decay, value) for value in row]
        for value, place in zip(row, places, strict=True):
            lanes.store(value, given["out"], builder.add(target, place))
        for name, factors in (("m", "k_next"), ("p", "q_next")):
            for value, total in zip(row, sums.get(name, ()), strict=False):
                factor = lanes.splat_at(given[factors], loop.index)
                builder.store(lanes.multiply_add(factor, value, builder.load(total)), total)
    for name, totals in sums.items():
        for total, place in zip(totals, places, strict=True):
            lanes.store(builder.load(total), given[name], place)


def plain_begin(
    state: F32Array, decays: F32Array, k: F32Array, q: F32Array, out: F32Array, m: F32Array, p: F32Array
) -> None:
    """Write out = diag(decays) S, m = out^T k and p = out^T q, by NumPy."""
    out[:] = decays[:, np.newaxis] * state
    for factors, total in ((k, m), (q, p)):
        total[:] = 0
        for d in range(len(out)):
            total += factors[d] * out[d]


def plain_finish(state: F32Array, k: F32Array, delta: F32Array, out: F32Array) -> None:
    """Write out = S + k delta^T, by NumPy."""
    out[:] = k[:, np.newaxis] * delta + state


def plain_advance(state: F32Array, token: Any, decays: F32Array, following: Any, m: F32Array, p: F32Array) -> None:
    """Finish and begin in place, by NumPy."""
    plain_finish(state, *token, state)
    plain_begin(state, decays, *following, state, m, p)


if numba.config.DISABLE_JIT:
    begin, finish, advance = plain_begin, plain_finish, plain_advance
else:
    _emit_begin = pass_intrinsic(("state", "decays", "k_next", "q_next", "out", "m", "p"), _emit)
    _emit_finish = pass_intrinsic(("state", "k", "delta", "out"), _emit)
    _emit_advance = pass_intrinsic(("state", "k", "delta", "decays", "k_next", "q_next", "out", "m", "p"), _emit)

    @kernel
    def begin(
        state: F32Array, decays: F32Array, k: F32Array, q: F32Array, out: F32Array, m: F32Array, p: F32Array
    ) -> None:
        """Write out = diag(decays) S, which may be S, m = out^T k and p = out^T q."""
        _emit_begin((state, decays, k, q, out, m, p))

    @kernel
    def finish(state: F32Array, k: F32Array, delta: F32Array, out: F32Array) -> None:
        """Write out = S + k delta^T, which may be S."""
        _emit_finish((state, k, delta, out))

    @kernel
    def advance(state: F32Array, token: Any, decays: F32Array, following: Any, m: F32Array, p: F32Array) -> None:
        """Finish a token (k, delta) and begin the one that follows, (k, q), in place; the bits of both."""
        _emit_advance((state, *token, decays, *following, state, m, p))
