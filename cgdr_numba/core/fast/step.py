"""The recurrent path: a run of tokens over one head's state, which is read and written once for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast import k_first, v_first
from cgdr_numba.core.fast.convert import narrow_row, widen_row, widen_rows
from cgdr_numba.core.fast.pairs import prepare_pairs
from cgdr_numba.core.fast.passes import Passes
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_exp64 = kernel(exp64)
_prepare_pairs = prepare_pairs


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


@kernel
def take_rows(arena: F32Array, dk: int, dv: int) -> Rows:
    """Return the rows of one arena (flat floats); each begins on a cache line."""
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    q_end, k_end = CHUNK * key, 2 * CHUNK * key
    rows = k_end + CHUNK
    return Rows(
        arena[:q_end].reshape(CHUNK, key),
        arena[q_end:k_end].reshape(CHUNK, key),
        arena[k_end:rows],
        arena[rows : rows + dv],
        arena[rows + value : rows + value + dv],
        arena[rows + 2 * value : rows + 2 * value + dv],
    )


def rows_bytes(dk: int, dv: int) -> int:
    """Return the bytes of `Rows`."""
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    return 4 * (2 * CHUNK * key + CHUNK + 3 * value)


@kernel
def load_tokens(q_rows: Words, k_rows: Words, kind: int, how: Any, rows: Rows) -> None:
    """Fill q, k and kq with the tokens [L, Dk, w] of one key head; `how` is (whether to normalise, scale)."""
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


def _make_run_tokens(passes: Passes, key_axis: int) -> Callable[..., None]:
    """Return the loop over tokens for the states that `passes` are for."""
    read, update, update_and_read = passes

    @kernel
    def run(x: Tokens, place: Any, source: F32Array, state: F32Array, rows: Rows) -> None:
        """Run tokens over a state that is read from `source` and left in `state` (which may be one).

        `place` is (batch row, first token, number of tokens up to 64, value head). Every token computes the same
        numbers whether it comes first, last or in between, so a run may be cut anywhere without a changed bit.
        """
        kind, g_kind, beta_kind = x.kinds
        row, begin, n_tokens, head = place
        columns = x.v.shape[3]
        delta, m, p = rows.delta[:columns], rows.m[:columns], rows.p[:columns]
        dk = source.shape[key_axis]
        decay = np.float32(_exp64(np.float64(widen(x.g[row, begin, head], g_kind))))
        read(source, rows.k[0, :dk], rows.q[0, :dk], m, p)
        for i in range(n_tokens):
            t = begin + i
            widen_row(x.v[row, t, head], kind, delta)
            beta = widen(x.beta[row, t, head], beta_kind)
            finish_token(decay, beta, rows.kq[i], delta, m, p)
            narrow_row(p, kind, x.out[row, t, head])
            k = rows.k[i, :dk]
            if i + 1 == n_tokens:
                update(source, decay, k, delta, state)
            else:
                # The next decay's exp is on its way while this token's pass runs.
                next_decay = np.float32(_exp64(np.float64(widen(x.g[row, t + 1, head], g_kind))))
                k_next, q_next = rows.k[i + 1, :dk], rows.q[i + 1, :dk]
                update_and_read(source, decay, k, delta, k_next, q_next, state, m, p)
                decay = next_decay
            source = state

    return run


run_by_key = _make_run_tokens(k_first.passes, 0)
"""Tokens over a state whose rows are keys [Dk, Dv]."""
run_by_value = _make_run_tokens(v_first.passes, 1)
"""Tokens over a state whose rows are values [Dv, Dk]."""
