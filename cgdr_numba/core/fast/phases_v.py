"""Phases of a chunk of one value head, or of a V tile of it; every column is independent of the others."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.blocks import largest, load_block, transpose
from cgdr_numba.core.fast.chunk_arena import HeadRows
from cgdr_numba.core.fast.convert import adjacent, narrow_rows, swapped, widen_rows
from cgdr_numba.core.fast.decay import Gates
from cgdr_numba.core.fast.microkernel import multiply_ahead, multiply_onto_scaled_ahead
from cgdr_numba.core.fast.solve import Triangle, solve
from cgdr_numba.core.fast.stream import stream_rows
from cgdr_numba.core.jit import kernel, spliced_kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_load, _transpose, _swapped, _solve, _largest = load_block, transpose, swapped, solve, largest
_multiply_ahead, _update = multiply_ahead, multiply_onto_scaled_ahead

FAR: Final = np.float32(2.0**50)
"""Size of U, or of a state, from which on columns take the token loop.

Below it, with keys, betas and growth as limited as they are, nothing that either form computes leaves float32, so both
are finite: results are finite exactly where the token loop's are.
"""


@kernel
def load_state(words: Words, form: tuple[int, bool], tile: tuple[int, int], state: F32Array, turn: F32Array) -> None:
    """S = columns c0 to c1 of the elements [Dk, Dv, w], or [Dv, Dk, w]; `form` is (kind, whether V is first)."""
    kind, is_v_first = form
    by_key = _swapped(words) if is_v_first else words
    columns = by_key[:, tile[0] : tile[1]]
    if columns.shape[0] > 1 and adjacent(kind, columns.strides[0], columns.strides[2], columns.shape[2]):
        for c in range(0, columns.shape[1], 16):
            _load(columns[:, c : min(c + 16, columns.shape[1])], kind, state[:, c : c + 16], turn)
    else:
        widen_rows(columns, kind, state)


@kernel
def store_state(state: F32Array, form: tuple[int, bool], tile: tuple[int, int], words: Words, turn: F32Array) -> None:
    """Columns c0 to c1 of the elements = S, rounded to nearest even; as `load_state` has them."""
    kind, is_v_first = form
    by_key = _swapped(words) if is_v_first else words
    columns = by_key[:, tile[0] : tile[1]]
    rows = columns.shape[0]
    if rows > 1 and adjacent(kind, columns.strides[0], columns.strides[2], columns.shape[2]):
        key = (rows + 15) // 16 * 16
        strip = turn[: 16 * key].reshape(16, key)
        for c in range(0, columns.shape[1], 16):
            end = min(c + 16, columns.shape[1])
            _transpose(state[:rows, c:end], strip)
            narrow_rows(strip, kind, _swapped(columns[:, c:end]))
    else:
        narrow_rows(state, kind, columns)


@kernel
def is_near(columns: int, state: F32Array, dk: int, bounds: F32Array, peaks: F32Array) -> bool:
    """Return whether all columns of the state and of U stay near; peaks of others become infinite.

    A bound that is too large may be old: it is then measured anew.
    """
    n_far = 0
    for block in range((columns + 15) // 16):
        if not bounds[block] <= FAR:
            bounds[block] = _largest(state[:dk, block * 16 : min(block * 16 + 16, columns)])
        if not (bounds[block] <= FAR and peaks[block] <= FAR):
            peaks[block] = np.inf
            n_far += 1
    return n_far == 0


@kernel
def move_bounds(columns: int, widest: np.float32, gates: Gates, n: int, peaks: F32Array, bounds: F32Array) -> None:
    """Bounds of the updated state: what decays of the old one, and n products of K and U, whose sizes are known."""
    reach = gates.rest[0]
    for i in range(n):
        reach = max(reach, gates.rest[i])
    for block in range((columns + 15) // 16):
        bounds[block] = gates.decay[n - 1] * bounds[block] + np.float32(n) * (widest * reach * peaks[block])


@spliced_kernel
def run_head(at: Any, ahead: Any, state: F32Array, sizes: Any, x: HeadRows) -> bool:
    """All phases of one value head's chunk after its scores; returns False, and leaves the state, where it gets far.

    K S and Q S into through; V, U and O by `solve`; out = O; S = e^G_last S + K^T (e^(G_last - G) U). Reads pair, b, m,
    gates; `at` is (v, out, kind, whether out is streamed), v and out being [r, n, w]; `ahead` is (q, k, v) of what
    comes next, fetched meanwhile; `sizes` is (Dk, bounds of the state, largest element of the pair).
    """
    v, out, kind, is_streamed = at
    next_q, next_k, next_v = ahead
    dk, bounds, widest = sizes
    n, columns, gates = v.shape[0], v.shape[1], x.gates
    _load(v, kind, x.u, x.turn)
    _multiply_ahead(x.pair[: 2 * n, :dk], state[:dk], x.through[: 2 * n], next_v)
    u, through = x.u[:n, :columns], x.through[: 2 * n, :columns]
    left = gates.decay[n - 1]
    for d in range(dk):
        x.all_decay[d] = left
    _solve(Triangle(x.b, x.m, gates.beta, gates.pull, gates.decay, gates.rest, through, u, x.peaks))
    if not is_near(columns, state, dk, bounds, x.peaks):
        return False
    if is_streamed:
        stream_rows(through[n:], kind, out)
    else:
        narrow_rows(through[n:], kind, out)
    _update(x.pair[:n, :dk].T, u, x.all_decay[:dk], state[:dk, :columns], next_q, next_k)
    move_bounds(columns, widest, gates, n, x.peaks, bounds)
    return True


@spliced_kernel
def finish_columns(c: int, values: Any, state: F32Array, dk: int, x: HeadRows) -> None:
    """Out and the state of 16 columns from c on, which stayed near where others did not; `values` is (v, out, kind)."""
    v, out, kind = values
    n, end = out.shape[0], min(c + 16, out.shape[1])
    narrow_rows(x.through[n : 2 * n, c:end], kind, out[:, c:end])
    nothing = v[:0]
    _update(x.pair[:n, :dk].T, x.u[:n, c:end], x.all_decay[:dk], state[:dk, c:end], nothing, nothing)
