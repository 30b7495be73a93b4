"""What a core does to one value head of a sequence in a call over a pool, piece by piece.

Parameters: rows of global memory as words and their kind, sizes, the arithmetic, then queues and slices by their names
in the ledger; what is written comes last. L is the sequence's number of tokens, cur the tile's number of rows.
"""

import numpy as np

from cgdr_numba.core.dtypes import BF16, FP16, f32_of, half_to_f32, widen
from cgdr_numba.core.faithful.arith import Arith, settle
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.vector_ops import cast_out, dot, exp, muls
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS, wide_dot
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)


@kernel
def is_queued(kind: int) -> bool:
    """Return whether elements go through queue buffers, which hold 16-bit words; others pass element by element."""
    return kind in (FP16, BF16)


@kernel
def load_head_values(rows: Words, kind: int, y: F32Array) -> None:
    """beta, or a log decay, of all tokens and heads: y[0, i Hv + h] = widen(rows[i, h])."""
    n_heads = rows.shape[1]
    for i in range(rows.shape[0]):
        for h in range(n_heads):
            y[0, i * n_heads + h] = widen(rows[i, h], kind)


@kernel
def load_decays(rows: Words, kind: int, arith: Arith | None, y: F32Array) -> None:
    """Decays of all tokens and heads: y = Exp(widen(rows)), one vector operation over all."""
    load_head_values(rows, kind, y)
    exp(y, 0, y, rows.shape[0] * rows.shape[1], arith)


@kernel
def load_column_decays(rows: Words, kind: int, arith: Arith | None, y: F32Array) -> None:
    """Decays by column: y[i, d] = Exp(widen(rows[i, d])) for d < Dk."""
    load_rows(rows, kind, y)
    for i in range(rows.shape[0]):
        exp(y[i : i + 1], 0, y[i : i + 1], rows.shape[1], arith)


@kernel
def load_rows(rows: Words, kind: int, y: F32Array) -> None:
    """q, k or v of a head: y[i, c] = widen(rows[i, c]); columns behind the rows' are 0."""
    n_columns = rows.shape[1]
    for i in range(rows.shape[0]):
        for c in range(n_columns):
            y[i, c] = widen(rows[i, c], kind)
        for c in range(n_columns, y.shape[1]):
            y[i, c] = _ZERO


@kernel
def scale_query(n_tokens: int, dk: int, scale: np.float32, arith: Arith | None, q: F32Array) -> None:
    """Q[i] = fl(q[i] * scale) in place."""
    for i in range(n_tokens):
        muls(q, i, q, scale, dk, arith)


@kernel
def prefetch_state(rows: Words, kind: int, align_k: int, state_queue: Words) -> None:
    """Issue the transfer of state rows [cur, Dk] into the queue's one buffer, as they are."""
    if is_queued(kind):
        for r in range(rows.shape[0]):
            for d in range(rows.shape[1]):
                state_queue[r * align_k + d] = rows[r, d, 0]


@kernel
def take_state(rows: Words, kind: int, align_k: int, n_blocks: int, state_queue: Words, state: F32Array) -> None:
    """Take the tile out of the queue and widen it into the state's blocks, which frees the buffer.

    Elements that are not queued are read from `rows`, where nothing has been written since the prefetch.
    """
    n_rows, dk = rows.shape[0], rows.shape[1]
    for block in range(n_blocks):
        state[block, :] = _ZERO
    for r in range(n_rows):
        block, lane = r // DOT_COLUMNS, r % DOT_COLUMNS
        for d in range(dk):
            if kind == FP16:
                value = half_to_f32(np.uint32(state_queue[r * align_k + d]))
            elif kind == BF16:
                value = f32_of(np.uint32(state_queue[r * align_k + d]) << np.uint32(16))
            else:
                value = widen(rows[r, d], kind)
            state[block, d * DOT_COLUMNS + lane] = value


@kernel
def decay_state(factor: np.float32, n_blocks: int, dk: int, arith: Arith | None, state: F32Array) -> None:
    """S = fl(S * factor)."""
    for block in range(n_blocks):
        muls(state, block, state, factor, dk * DOT_COLUMNS, arith)


@kernel
def decay_columns(factors: F32Array, n_blocks: int, dk: int, arith: Arith | None, state: F32Array) -> None:
    """S[v][d] = fl(S[v][d] * factors[d])."""
    for block in range(n_blocks):
        for d in range(dk):
            factor = factors[d]
            for lane in range(d * DOT_COLUMNS, (d + 1) * DOT_COLUMNS):
                state[block, lane] = settle(state[block, lane] * factor, arith)


@kernel
def dot_rows(state: F32Array, block: int, x: F32Array, arith: Arith | None, product: F32Array, sums: F32Array) -> None:
    """sums[:16] = DotFp32 of x with each of the 16 rows of a block, over Dk rounded up to 16; x may be in no slice.

    Sixteen side by side where nothing saturates, else one after another: equal bits.
    """
    n = len(x)
    if arith is None:
        wide_dot(x, state[block], n, sums)
        return
    rows = state[block].reshape(n, DOT_COLUMNS)
    for lane in range(DOT_COLUMNS):
        sums[lane] = dot(rows[:, lane], x, product, arith)


@kernel
def learn_rows(
    k: F32Array,
    v: F32Array,
    beta: np.float32,
    n_blocks: int,
    dk: int,
    arith: Arith | None,
    product: F32Array,
    sums: F32Array,
    state: F32Array,
) -> None:
    """The delta rule on every row v of the tile; k [align_k], v [blocks * 16].

    m = S[v] . k;  delta = fl(fl(v - m) * beta), scalars;  S[v] = fl(S[v] + fl(k * delta)), a Muls and an Add.
    """
    for block in range(n_blocks):
        dot_rows(state, block, k, arith, product, sums)
        for lane in range(DOT_COLUMNS):
            sums[lane] = (v[block * DOT_COLUMNS + lane] - sums[lane]) * beta
        for d in range(dk):
            factor = k[d]
            for lane in range(DOT_COLUMNS):
                at = d * DOT_COLUMNS + lane
                state[block, at] = settle(state[block, at] + settle(factor * sums[lane], arith), arith)


@kernel
def read_rows_out(
    q: F32Array, n_blocks: int, arith: Arith | None, state: F32Array, product: F32Array, sums: F32Array, attn: F32Array
) -> None:
    """o[v] = S[v] . Q, by the same dots."""
    for block in range(n_blocks):
        dot_rows(state, block, q, arith, product, sums)
        for lane in range(DOT_COLUMNS):
            attn[block * DOT_COLUMNS + lane] = sums[lane]


@kernel
def queue_attn(attn: F32Array, kind: int, arith: Arith | None, buffer: Words, out: Words) -> None:
    """Cast o into a buffer of the queue; elements that are not queued go to out [cur] at once."""
    for r in range(out.shape[0]):
        if is_queued(kind):
            cast_out(attn[r], kind, buffer[r : r + 1], arith)
        else:
            cast_out(attn[r], kind, out[r], arith)


@kernel
def copy_attn(buffer: Words, kind: int, out: Words) -> None:
    """One transfer of a buffer's outputs to out [cur]."""
    if is_queued(kind):
        for r in range(out.shape[0]):
            out[r, 0] = buffer[r]


@kernel
def queue_state(state: F32Array, kind: int, align_k: int, arith: Arith | None, buffer: Words, rows: Words) -> None:
    """Cast S into a buffer of the queue; elements that are not queued go to the slot's rows [cur, Dk] at once."""
    for r in range(rows.shape[0]):
        block, lane = r // DOT_COLUMNS, r % DOT_COLUMNS
        for d in range(rows.shape[1]):
            value = state[block, d * DOT_COLUMNS + lane]
            if is_queued(kind):
                at = r * align_k + d
                cast_out(value, kind, buffer[at : at + 1], arith)
            else:
                cast_out(value, kind, rows[r, d], arith)


@kernel
def copy_state(buffer: Words, kind: int, align_k: int, rows: Words) -> None:
    """Transfers of a buffer's rows to the slot's rows [cur, Dk], one a row."""
    if is_queued(kind):
        for r in range(rows.shape[0]):
            for d in range(rows.shape[1]):
                rows[r, d, 0] = buffer[r * align_k + d]
