"""The recurrent path over a pool of states: a run of tokens over some rows of one head, each left in its slot."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast.convert import narrow_row, narrow_rows, widen_row
from cgdr_numba.core.fast.step import Rows, rows_bytes, rows_floats, take_rows
from cgdr_numba.core.fast.v_first import RowTokens
from cgdr_numba.core.fast.v_first import run_rows as run_tokens
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_exp64 = kernel(exp64)
_rows_floats, _run_rows = kernel(rows_floats), run_tokens


class PoolRows(NamedTuple):
    """Scratch of one core."""

    tokens: Rows
    states: F32Array
    """[n, Dv, ceil16(Dk)]; states of n value heads between tokens, where the pool is not float32."""


class PoolTokens(NamedTuple):
    """Global memory of some value rows of a call's heads, and its element kinds."""

    v: Words
    """[T, Hv, n, w]"""
    g: Words
    """[T, Hv, w]"""
    beta: Words
    """[T, Hv, w]"""
    out: Words
    """[T, Hv, n, w]"""
    kinds: Any
    """(kind of q, k, v and out; of g; of beta)"""


class Pool(NamedTuple):
    """States in their slots, and which slot is whose."""

    words: Words
    """[slots, Hv, Dv, Dk, w]"""
    floats: F32Array
    """[slots, Hv, Dv, Dk]; the same where it is direct."""
    kind: int
    is_direct: bool
    """Whether the pool is float32, so that passes read and write it as it is."""
    write_slot: NDArray[np.int64]
    """[T]"""


def pool_bytes(dk: int, dv: int, n_states: int) -> int:
    """Return the bytes of `PoolRows`."""
    return rows_bytes(dk, dv) + 4 * n_states * dv * ((dk + 15) // 16 * 16)


@kernel
def take_pool_rows(arena: F32Array, dk: int, dv: int, n_states: int) -> PoolRows:
    """Return the slices of one arena (flat floats); each begins on a cache line."""
    key, begin = (dk + 15) // 16 * 16, _rows_floats(dk, dv)
    states = arena[begin : begin + n_states * dv * key].reshape(n_states, dv, key)
    return PoolRows(take_rows(arena, dk, dv), states)


@kernel
def run_rows(x: PoolTokens, place: Any, own: Any, pool: Pool, rows: Rows) -> None:
    """Run tokens over value rows r0 to r1 of a state, with the bits of `step.run_by_value`.

    `place` is (first token, number of tokens up to 64, head, r0, r1); x holds those value rows alone. `own` is (rows
    that the state is read from, the same rows of scratch). Tokens in a row that have one slot run together, and the
    state goes to the slot behind the last of them; where the pool is not float32, it lies in scratch meanwhile.
    """
    kind, g_kind, beta_kind = x.kinds
    begin, n_tokens, head, r0, r1 = place
    source, scratch = own
    dk = source.shape[1]
    values = rows.values[:n_tokens, : r1 - r0]
    for i in range(n_tokens):
        t = begin + i
        rows.decay[i] = np.float32(_exp64(np.float64(widen(x.g[t, head], g_kind))))
        rows.beta[i] = widen(x.beta[t, head], beta_kind)
        widen_row(x.v[t, head], kind, values[i])
    first = 0
    while first < n_tokens:
        slot, end = pool.write_slot[begin + first], first + 1
        while end < n_tokens and pool.write_slot[begin + end] == slot:
            end += 1
        target = pool.floats[slot, head, r0:r1] if pool.is_direct else scratch
        k, q, kq = rows.k[first:end, :dk], rows.q[first:end, :dk], rows.kq[first:end]
        tokens = RowTokens(source, k, q, kq, rows.decay[first:end], rows.beta[first:end], values[first:end], target)
        _run_rows(tokens)
        if not pool.is_direct:
            narrow_rows(target, pool.kind, pool.words[slot, head, r0:r1])
        source, first = target, end
    for i in range(n_tokens):
        narrow_row(values[i], kind, x.out[begin + i, head])
