"""The recurrent path over a pool of states: a run of tokens over some rows of one head, each left in its slot."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast import v_first
from cgdr_numba.core.fast.convert import narrow_row, narrow_rows, widen_row
from cgdr_numba.core.fast.step import Rows, finish_token, rows_bytes, take_rows
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_exp64 = kernel(exp64)
_read, _update, _update_and_read = v_first.passes


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
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    # As many floats as take_rows takes.
    begin = 128 * key + 64 + 3 * value
    states = arena[begin : begin + n_states * dv * key].reshape(n_states, dv, key)
    return PoolRows(take_rows(arena, dk, dv), states)


@kernel
def run_rows(x: PoolTokens, place: Any, own: Any, pool: Pool, rows: Rows) -> None:
    """Run tokens over value rows r0 to r1 of a state, with the passes and the bits of `step.run_by_value`.

    `place` is (first token, number of tokens up to 64, head, r0, r1); x holds those value rows alone. `own` is (rows
    that the state is read from, the same rows of scratch). Where the pool is float32, the state after a token is
    written to its slot; else it stays in scratch, and goes to the slot unless the next token has the same.
    """
    kind, g_kind, beta_kind = x.kinds
    begin, n_tokens, head, r0, r1 = place
    source, scratch = own
    dk = source.shape[1]
    delta, m, p = rows.delta[: r1 - r0], rows.m[: r1 - r0], rows.p[: r1 - r0]
    decay = np.float32(_exp64(np.float64(widen(x.g[begin, head], g_kind))))
    _read(source, rows.k[0, :dk], rows.q[0, :dk], m, p)
    slot, target = np.int64(-1), scratch
    for i in range(n_tokens):
        t = begin + i
        is_last = i + 1 == n_tokens
        if pool.write_slot[t] != slot:
            slot = pool.write_slot[t]
            target = pool.floats[slot, head, r0:r1] if pool.is_direct else scratch
        widen_row(x.v[t, head], kind, delta)
        finish_token(decay, widen(x.beta[t, head], beta_kind), rows.kq[i], delta, m, p)
        narrow_row(p, kind, x.out[t, head])
        k = rows.k[i, :dk]
        if is_last:
            _update(source, decay, k, delta, target)
        else:
            next_decay = np.float32(_exp64(np.float64(widen(x.g[t + 1, head], g_kind))))
            _update_and_read(source, decay, k, delta, rows.k[i + 1, :dk], rows.q[i + 1, :dk], target, m, p)
            decay = next_decay
        if not pool.is_direct and (is_last or pool.write_slot[t + 1] != slot):
            narrow_rows(target, pool.kind, pool.words[slot, head, r0:r1])
        source = target
