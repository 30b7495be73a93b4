"""The recurrent path: a run of tokens over one head's state, which is read and written once for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast import k_first, v_first
from cgdr_numba.core.fast.convert import narrow_row, widen_row
from cgdr_numba.core.fast.passes import Passes
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.l2norm import L2NORM_EPS

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_ONE, _EPS = np.float32(1.0), np.float32(L2NORM_EPS)
_exp64 = kernel(exp64)
_read_v = v_first.read


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
    pair: F32Array
    """Two products of rows."""


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
        arena[rows + 3 * value : rows + 3 * value + 16],
    )


def rows_bytes(dk: int, dv: int) -> int:
    """Return the bytes of `Rows`."""
    key, value = (dk + 15) // 16 * 16, (dv + 15) // 16 * 16
    return 4 * (2 * CHUNK * key + CHUNK + 3 * value + 16)


@kernel
def load_tokens(q_rows: Words, k_rows: Words, kind: int, how: Any, rows: Rows) -> None:
    """Fill q, k and kq with the tokens [L, Dk, w] of one key head; `how` is (whether to normalise, scale).

    q = scale q / sqrt(q . q + 1e-6), k = k / sqrt(k . k + 1e-6) where normalised; kq is of the rows as they are then.
    """
    with_norm, scale = how
    dk = q_rows.shape[1]
    for i in range(q_rows.shape[0]):
        q, k, products = rows.q[i, :dk], rows.k[i, :dk], rows.pair
        widen_row(q_rows[i], kind, q)
        widen_row(k_rows[i], kind, k)
        if with_norm:
            _read_v(rows.q[i : i + 1, :dk], q, q, products[:1], products[1:2])
            multiply_row(q, dk, scale / np.sqrt(products[0] + _EPS))
            _read_v(rows.k[i : i + 1, :dk], k, q, products[:1], products[1:2])
            factor = _ONE / np.sqrt(products[0] + _EPS)
            multiply_row(k, dk, factor)
            rows.kq[i] = products[1] * factor
        else:
            multiply_row(q, dk, scale)
            _read_v(rows.k[i : i + 1, :dk], q, q, products[:1], products[1:2])
            rows.kq[i] = products[0]


@kernel
def multiply_row(x: F32Array, n: int, factor: np.float32) -> None:
    """x[:n] = x[:n] * factor."""
    for d in range(n):
        x[d] = x[d] * factor


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
    """Global memory of one (sequence, value head) for up to 64 tokens, and its element kinds."""

    v: Words
    """[L, Dv, w]"""
    g: Words
    """[L, w]"""
    beta: Words
    """[L, w]"""
    out: Words
    """[L, Dv, w]"""
    kinds: Any
    """(kind of q, k, v and out; of g; of beta)"""


def _make_run_tokens(passes: Passes) -> Callable[..., None]:
    """Return the loop over tokens for the states that `passes` are for."""
    read, update, update_and_read = passes

    @kernel
    def run(x: Tokens, dk: int, source: F32Array, state: F32Array, rows: Rows) -> None:
        """Run the tokens over a state that is read from `source` and left in `state` (which may be one).

        Every token computes the same numbers whether it comes first, last or in between, so a run may be cut anywhere
        without a changed bit.
        """
        kind, g_kind, beta_kind = x.kinds
        n_tokens = x.v.shape[0]
        read(source, rows.k[0, :dk], rows.q[0, :dk], rows.m, rows.p)
        for i in range(n_tokens):
            decay = np.float32(_exp64(np.float64(widen(x.g[i], g_kind))))
            widen_row(x.v[i], kind, rows.delta)
            finish_token(decay, widen(x.beta[i], beta_kind), rows.kq[i], rows.delta, rows.m, rows.p)
            narrow_row(rows.p, kind, x.out[i])
            k = rows.k[i, :dk]
            if i + 1 == n_tokens:
                update(source, decay, k, rows.delta, state)
            else:
                k_next, q_next = rows.k[i + 1, :dk], rows.q[i + 1, :dk]
                update_and_read(source, decay, k, rows.delta, k_next, q_next, state, rows.m, rows.p)
            source = state

    return run


run_by_key = _make_run_tokens(k_first.passes)
"""Tokens over a state whose rows are keys [Dk, Dv]."""
run_by_value = _make_run_tokens(v_first.passes)
"""Tokens over a state whose rows are values [Dv, Dk]."""
