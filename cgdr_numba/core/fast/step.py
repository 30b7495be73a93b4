"""The recurrent path: a run of tokens over one head's state, which is read and written once for all of them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast import k_first
from cgdr_numba.core.fast.convert import narrow_row, widen_row, widen_rows
from cgdr_numba.core.fast.pairs import prepare_pairs
from cgdr_numba.core.fast.v_first import RowTokens, run_rows
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_exp64 = kernel(exp64)
_prepare_pairs, _run_rows = prepare_pairs, run_rows
_read, _update, _update_and_read = k_first.passes


class Rows(NamedTuple):
    """Scratch of one core: up to 64 tokens of a key head, and rows of one token."""

    q: F32Array
    """[64, ceil16(Dk)]; q, normalised where asked, times scale."""
    k: F32Array
    """[64, ceil16(Dk)]"""
    kq: F32Array
    """[64]; k . q of each token."""
    delta: F32Array
    """[Dv]; v, then beta (v - S^T k)."""
    m: F32Array
    """[Dv]; S^T k."""
    p: F32Array
    """[Dv]; S^T q."""
    decay: F32Array
    """[64]; e^g of each token."""
    beta: F32Array
    """[64]"""
    values: F32Array
    """[64, ceil16(Dv)]; v of each token, then its outputs."""


@kernel
def take_rows(arena: F32Array, dk: int, dv: int) -> Rows:
    """Return the rows of one arena (flat floats); each begins on a cache line."""
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    k_rows, kq = CHUNK * key, 2 * CHUNK * key
    delta = kq + CHUNK
    m, p, decay = delta + value, delta + 2 * value, delta + 3 * value
    values = decay + 2 * CHUNK
    return Rows(
        arena[:k_rows].reshape(CHUNK, key),
        arena[k_rows:kq].reshape(CHUNK, key),
        arena[kq:delta],
        arena[delta : delta + dv],
        arena[m : m + dv],
        arena[p : p + dv],
        arena[decay : decay + CHUNK],
        arena[decay + CHUNK : values],
        arena[values : values + CHUNK * value].reshape(CHUNK, value),
    )


def rows_floats(dk: int, dv: int) -> int:
    """Return the floats of `Rows`, whole cache lines."""
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    return 2 * CHUNK * key + 3 * CHUNK + (CHUNK + 3) * value


def rows_bytes(dk: int, dv: int) -> int:
    """Return the bytes of `Rows`."""
    return 4 * rows_floats(dk, dv)


@kernel
def load_tokens(q_rows: Words, k_rows: Words, kind: int, how: Any, rows: Any) -> None:
    """Fill q, k and kq of rows with the tokens [L, Dk, w] of one key head; `how` is (whether to normalise, scale)."""
    n, dk = q_rows.shape[0], q_rows.shape[1]
    widen_rows(q_rows, kind, rows.q)
    widen_rows(k_rows, kind, rows.k)
    _prepare_pairs(rows.q[:n, :dk], rows.k[:n, :dk], how[0], how[1], rows.kq)


@kernel
def finish_token(
    decay: np.float32, beta: np.float32, kq: np.float32, delta: F32Array, m: F32Array, p: F32Array
) -> None:
    """Form delta = beta (v - a m), and p = a p + (k . q) delta, the updated state's product with q."""
    for c in range(len(delta)):
        change = beta * (delta[c] - decay * m[c])
        delta[c] = change
        p[c] = decay * p[c] + kq * change


class Tokens(NamedTuple):
    """Global memory of a call's value heads, and its element kinds."""

    v: Words
    """[B, T, Hv, Dv, w]"""
    g: Words
    """[B, T, Hv, w]"""
    beta: Words
    """[B, T, Hv, w]"""
    out: Words
    """[B, T, Hv, Dv, w]"""
    kinds: Any
    """(kind of q, k, v and out; of g; of beta)"""


@kernel
def run_by_key(x: Tokens, place: Any, source: F32Array, state: F32Array, rows: Rows) -> None:
    """Run tokens over a state [Dk, Dv] that is read from `source` and left in `state` (which may be one).

    `place` is (batch row, first token, number of tokens up to 64, value head). Every token computes the same numbers
    whether it comes first, last or in between, so a run may be cut anywhere without a changed bit.
    """
    kind, g_kind, beta_kind = x.kinds
    row, begin, n_tokens, head = place
    columns, dk = x.v.shape[3], source.shape[0]
    delta, m, p = rows.delta[:columns], rows.m[:columns], rows.p[:columns]
    decay = np.float32(_exp64(np.float64(widen(x.g[row, begin, head], g_kind))))
    _read(source, rows.k[0, :dk], rows.q[0, :dk], m, p)
    for i in range(n_tokens):
        t = begin + i
        widen_row(x.v[row, t, head], kind, delta)
        beta = widen(x.beta[row, t, head], beta_kind)
        finish_token(decay, beta, rows.kq[i], delta, m, p)
        narrow_row(p, kind, x.out[row, t, head])
        k = rows.k[i, :dk]
        if i + 1 == n_tokens:
            _update(source, decay, k, delta, state)
        else:
            # The next decay's exp is on its way while this token's pass runs.
            next_decay = np.float32(_exp64(np.float64(widen(x.g[row, t + 1, head], g_kind))))
            k_next, q_next = rows.k[i + 1, :dk], rows.q[i + 1, :dk]
            _update_and_read(source, decay, k, delta, k_next, q_next, state, m, p)
            decay = next_decay
        source = state


@kernel
def run_by_value(x: Tokens, place: Any, source: F32Array, state: F32Array, rows: Rows) -> None:
    """Run tokens over a state [Dv, Dk], as `run_by_key` does; a run may be cut anywhere here too."""
    kind, g_kind, beta_kind = x.kinds
    row, begin, n_tokens, head = place
    columns, dk = x.v.shape[3], source.shape[1]
    for i in range(n_tokens):
        t = begin + i
        rows.decay[i] = np.float32(_exp64(np.float64(widen(x.g[row, t, head], g_kind))))
        rows.beta[i] = widen(x.beta[row, t, head], beta_kind)
        widen_row(x.v[row, t, head], kind, rows.values[i])
    values = rows.values[:n_tokens, :columns]
    k, q = rows.k[:n_tokens, :dk], rows.q[:n_tokens, :dk]
    _run_rows(RowTokens(source, k, q, rows.kq, rows.decay, rows.beta, values, state))
    for i in range(n_tokens):
        narrow_row(values[i], kind, x.out[row, begin + i, head])
