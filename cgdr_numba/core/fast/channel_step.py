"""The recurrent path where channels or columns forget by themselves: a run of tokens over a V tile of one head."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import widen
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.fast.channel_passes import advance, decay, look, take
from cgdr_numba.core.fast.convert import narrow_row, widen_row, widen_rows
from cgdr_numba.core.fast.step import finish_token
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_exp64 = kernel(exp64)
_look, _decay, _take, _advance = look, decay, take, advance

ONE: Final = np.float32(1.0)
_LOG2_E: Final = 1.4426950408889634
_LN2: Final = 0.6931471805599453
# Adding 1.5 * 2^52 puts the nearest integer into the last bits.
_ROUNDER: Final = 6755399441055744.0
# Beyond, e^x is 0 or infinite in float32.
_LOWEST, _HIGHEST = -110.0, 90.0


class ChannelRows(NamedTuple):
    """Scratch of one core: up to 64 tokens of a key head, decays of a value head, states, and rows of one token."""

    q: F32Array
    """[64, ceil16(Dk)]; q, normalised where asked, times scale."""
    k: F32Array
    """[64, ceil16(Dk)]"""
    decays: F32Array
    """[64, ceil16(Dk)]; e^gk of one value head."""
    ones: F32Array
    """[ceil16(Dk)]; decays of channels that have decayed already."""
    kq: F32Array
    """[64]; k . q of each token."""
    columns: F32Array
    """[width]; e^gv of one token."""
    delta: F32Array
    """[width]; v, then beta (v - S^T k)."""
    m: F32Array
    """[width]; S^T k."""
    p: F32Array
    """[width]; S^T q."""
    states: F32Array
    """[n, ceil16(Dk), width]; states of n value heads."""
    turn: F32Array
    """Flat; blocks on their way to being transposed."""


class ChannelTokens(NamedTuple):
    """Global memory of a V tile of n columns, and element kinds."""

    v: Words
    """[B, T, Hv, n, w]"""
    g: Words
    """[B, T, Hv, w]"""
    gv: Words
    """[B, T, Hv, n, w]"""
    beta: Words
    """[B, T, Hv, w]"""
    out: Words
    """[B, T, Hv, n, w]"""
    kinds: Any
    """(kind of v and out; of g; of gv; of beta)"""
    gates: tuple[bool, bool]
    """Whether there is (g, gv)."""


def channel_bytes(dk: int, width: int, n_states: int) -> int:
    """Return the bytes of an arena for V tiles of `width` columns, a multiple of 16, of n_states heads."""
    key = (dk + 15) // 16 * 16
    return 4 * (3 * CHUNK * key + key + CHUNK + 4 * width + n_states * key * width + 16 * max(key, width))


@kernel
def take_channel_rows(arena: F32Array, dk: int, width: int, n_states: int) -> ChannelRows:
    """Return the slices of an arena (flat floats); each begins on a cache line. `ones` are filled."""
    key = (dk + 15) // 16 * 16
    block = CHUNK * key
    ones = 3 * block
    kq = ones + key
    rows = kq + CHUNK
    states = rows + 4 * width
    turn = states + n_states * key * width
    arena[ones:kq] = ONE
    return ChannelRows(
        arena[:block].reshape(CHUNK, key),
        arena[block : 2 * block].reshape(CHUNK, key),
        arena[2 * block : ones].reshape(CHUNK, key),
        arena[ones:kq],
        arena[kq:rows],
        arena[rows : rows + width],
        arena[rows + width : rows + 2 * width],
        arena[rows + 2 * width : rows + 3 * width],
        arena[rows + 3 * width : states],
        arena[states:turn].reshape(n_states, key, width),
        arena[turn:],
    )


@kernel
def exp_in_place(x: F32Array) -> None:
    """Replace x by e^x within an ulp of float32: 0 where that is below float32, infinite above, NaN where x is."""
    for i in range(len(x)):
        value = np.float64(x[i])
        t = value if value > _LOWEST else _LOWEST
        t = t if t < _HIGHEST else _HIGHEST
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
        x[i] = np.float32(p * power if value == value else value)


@kernel
def load_decays(gates: Words, kind: int, rows: ChannelRows) -> None:
    """Fill decays with e^gk of tokens [L, Dk, w] of one value head."""
    n, dk = gates.shape[0], gates.shape[1]
    widen_rows(gates, kind, rows.decays)
    for i in range(n):
        exp_in_place(rows.decays[i, :dk])


@kernel
def load_gates(x: ChannelTokens, at: Any, columns: F32Array) -> np.float32:
    """Return e^g of a token, `at` being (batch row, token, value head), and fill columns with its e^gv."""
    row, t, head = at
    if x.gates[1]:
        widen_row(x.gv[row, t, head], x.kinds[2], columns)
        exp_in_place(columns)
    else:
        columns[:] = ONE
    return np.float32(_exp64(np.float64(widen(x.g[row, t, head], x.kinds[1])))) if x.gates[0] else ONE


@kernel
def write_token(x: ChannelTokens, at: Any, i: int, columns: int, rows: ChannelRows) -> None:
    """Form delta and out of a token out of its sums m and p; it is number i of those that rows hold."""
    row, t, head = at
    delta, p = rows.delta[:columns], rows.p[:columns]
    widen_row(x.v[row, t, head], x.kinds[0], delta)
    finish_token(ONE, widen(x.beta[row, t, head], x.kinds[3]), rows.kq[i], delta, rows.m[:columns], p)
    narrow_row(p, x.kinds[0], x.out[row, t, head])


@kernel
def run_channels(x: ChannelTokens, place: Any, states: Any, rows: ChannelRows) -> None:
    """Run tokens over a V tile [Dk, n].

    `place` is (batch row, first token, number of tokens up to 64, value head, place of the first among those that
    rows hold); `states` are (where the tile is read, where it may lie meanwhile, where it is left), all of which may
    be one. Every token computes the same numbers whether it comes first, last or in between.
    """
    row, start, n_tokens, head, first = place
    source, work, target = states
    dk, n = work.shape
    delta, m, p, columns = rows.delta[:n], rows.m[:n], rows.p[:n], rows.columns[:n]
    if n_tokens == 1 or x.gates[0] or x.gates[1]:
        for j in range(n_tokens):
            i, at = first + j, (row, start + j, head)
            gates = (load_gates(x, at, columns), rows.decays[i, :dk], columns)
            _look(source, gates, (rows.k[i, :dk], rows.q[i, :dk]), m, p)
            write_token(x, at, i, n, rows)
            _take(source, gates, (rows.k[i, :dk], delta), target)
            source = target
        return
    columns[:] = ONE
    i = first
    _decay(source, (ONE, rows.decays[i, :dk], columns), (rows.k[i, :dk], rows.q[i, :dk]), work, m, p)
    for j in range(n_tokens - 1):
        i = first + j
        write_token(x, (row, start + j, head), i, n, rows)
        following = (rows.k[i + 1, :dk], rows.q[i + 1, :dk])
        _advance(work, (rows.k[i, :dk], delta), rows.decays[i + 1, :dk], following, m, p)
    i = first + n_tokens - 1
    write_token(x, (row, start + n_tokens - 1, head), i, n, rows)
    _take(work, (ONE, rows.ones[:dk], columns), (rows.k[i, :dk], delta), target)
