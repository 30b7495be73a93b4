"""Phases of a chunk of one value head, or of a V tile of it; every column is independent of the others."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.blocks import load_block, transpose
from cgdr_numba.core.fast.chunk_arena import HeadRows
from cgdr_numba.core.fast.convert import adjacent, narrow_rows, swapped, widen_rows
from cgdr_numba.core.fast.microkernel import multiply_ahead, multiply_onto_scaled_ahead
from cgdr_numba.core.fast.solve import Triangle, solve
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_load, _transpose, _swapped, _solve = load_block, transpose, swapped, solve
_multiply_ahead, _update = multiply_ahead, multiply_onto_scaled_ahead


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
def run_head(at: Any, next_pair: tuple[Words, Words], next_v: Words, state: F32Array, dk: int, x: HeadRows) -> bool:
    """All phases of one value head's chunk after its scores; returns False, and leaves the state, where it overflows.

    K S and Q S into through; V, U and O by `solve`; out = O; S = e^G_last S + K^T (e^(G_last - G) U). Reads pair, b, m,
    gates; `at` is (v, out, kind), v and out being [r, n, w]. Rows of the next q and k, and v, are fetched meanwhile.
    """
    v, out, kind = at
    n, columns, gates = v.shape[0], v.shape[1], x.gates
    _load(v, kind, x.u, x.turn)
    _multiply_ahead(x.pair[: 2 * n, :dk], state[:dk], x.through[: 2 * n], next_v)
    u, through = x.u[:n, :columns], x.through[: 2 * n, :columns]
    left = gates.decay[n - 1]
    for d in range(dk):
        x.all_decay[d] = left
    if not _solve(Triangle(x.b, x.m, gates.beta, gates.pull, gates.decay, gates.rest, through, u, x.finite)):
        return False
    narrow_rows(through[n:], kind, out)
    _update(x.pair[:n, :dk].T, x.u[:n], x.all_decay[:dk], state[:dk], next_pair[0], next_pair[1])
    return True


@kernel
def finish_columns(c: int, out: Words, kind: int, state: F32Array, dk: int, x: HeadRows) -> None:
    """Out and the state of 16 columns from c on, which stayed finite where others did not."""
    n, end = out.shape[0], min(c + 16, out.shape[1])
    narrow_rows(x.through[n : 2 * n, c:end], kind, out[:, c:end])
    nothing = out[:0]
    _update(x.pair[:n, :dk].T, x.u[:n, c:end], x.all_decay[:dk], state[:dk, c:end], nothing, nothing)
