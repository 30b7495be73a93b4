"""Phases 1 to 5: the K side of a chunk, once for every (sequence, value head, chunk).

Parameters: rows of global memory as words and their kind, sizes, the arithmetic, then UB slices by their names in the
ledger; what a phase writes comes last. L is the chunk's number of rows, Dk the width of its keys.
"""

import numpy as np

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import half_to_f32, widen
from cgdr_numba.core.faithful.arith import Arith, settle
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.vector_ops import (
    axpy_chain,
    axpy_prefixes,
    dot,
    duplicate,
    exp,
    muls,
    sub,
    transpose,
)
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS, wide_dot
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@kernel
def stage_rows(rows: Words, staging: Words) -> None:
    """Strided DMA: copy fp16 rows [L, D, 1] into packed staging words."""
    n_columns = rows.shape[1]
    for i in range(rows.shape[0]):
        for d in range(n_columns):
            staging[i * n_columns + d] = rows[i, d, 0]


@kernel
def cast_rows(staging: Words, n_rows: int, n_columns: int, y: F32Array) -> None:
    """Cast: y[i][c] = widen of packed fp16 staging words; exact."""
    for i in range(n_rows):
        for c in range(n_columns):
            y[i, c] = half_to_f32(np.uint32(staging[i * n_columns + c]))


@kernel
def read_rows(rows: Words, kind: int, y: F32Array) -> None:
    """Element reads by the scalar unit: y[i][d] = widen(rows[i][d]); the same numbers as by DMA."""
    for i in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            y[i, d] = widen(rows[i, d], kind)


@kernel
def load_chunk_key(k_rows: Words, kind: int, by_dma: bool, v_half: Words, k: F32Array) -> None:
    """Phase 1: K[i][d] = widen(k[i][d]), by DMA through fp16 staging in the v slice or element by element."""
    if by_dma:
        stage_rows(k_rows, v_half)
        cast_rows(v_half, k_rows.shape[0], k_rows.shape[1], k)
    else:
        read_rows(k_rows, kind, k)


@kernel
def compute_g_cumsum(g_rows: Words, kind: int, g_cum: F32Array) -> None:
    """Phase 1b: G[i] = fl(G[i-1] + g[i]) from 0, by the scalar unit; g is rounded to float32 as it is read."""
    total = _ZERO
    for i in range(g_rows.shape[0]):
        total = total + widen(g_rows[i], kind)
        g_cum[0, i] = total


@kernel
def compute_k_beta(beta_rows: Words, kind: int, dk: int, arith: Arith | None, k: F32Array, k_beta: F32Array) -> None:
    """Phase 2: KB[i] = fl(K[i] * beta[i])."""
    for i in range(beta_rows.shape[0]):
        muls(k_beta, i, k, widen(beta_rows[i], kind), dk, arith)


@kernel
def prepare_decay_and_exp(
    n_rows: int, arith: Arith | None, g_cum: F32Array, delta: F32Array, exp_g: F32Array, decay: F32Array
) -> None:
    """Phase 3: E = Exp(G); D[i][j] = Exp(fl(G[i] - G[j])) for all 64 columns j.

    Reads G[L .. 63], stale, into lanes of E and D that nobody reads. The upper triangle may overflow; the consumers'
    loop bounds keep it out. The multiplication by 1 hands G from the scalar to the vector unit.
    """
    muls(g_cum, 0, g_cum, _ONE, CHUNK, arith)
    exp(exp_g, 0, g_cum, CHUNK, arith)
    for i in range(n_rows):
        duplicate(delta, 0, g_cum[0, i], CHUNK)
        sub(delta, 0, g_cum, CHUNK, arith)
        exp(decay, i, delta, CHUNK, arith)


@kernel
def prepare_attn_query_cache(
    q_rows: Words, scale: np.float32, arith: Arith | None, v_half: Words, q_cache: F32Array
) -> None:
    """Phase 3.5, where all L rows fit the output slice: QS[i][d] = fl(widen(q[i][d]) * scale), staged in v."""
    n_rows, dk = q_rows.shape[0], q_rows.shape[1]
    stage_rows(q_rows, v_half)
    cast_rows(v_half, n_rows, dk, q_cache)
    for i in range(n_rows):
        muls(q_cache, i, q_cache, scale, dk, arith)


@kernel
def compute_scores(
    n_rows: int,
    dk: int,
    arith: Arith | None,
    k_beta: F32Array,
    k: F32Array,
    decay: F32Array,
    v: F32Array,
    sums: F32Array,
    scores: F32Array,
) -> None:
    """Phase 4, direct part: B[i][j] = fl(-(KB[i] . K[j]) * D[i][j]) for j < i; the dots in the dot slice.

    Sixteen columns j at a time where K's rows fit the v slice as columns [Dk * 16] (it is dead from phase 3.5 to
    step 1) and nothing saturates, else one dot after another: equal bits.
    """
    if arith is not None or dk * DOT_COLUMNS > v.size:
        for i in range(1, n_rows):
            for j in range(i):
                product = dot(k_beta[i, :dk], k[j, :dk], sums, arith)
                scores[i, j] = -product * decay[i, j]
        return
    columns = v.reshape(v.size)
    for begin in range(0, n_rows, DOT_COLUMNS):
        transpose(k, begin, min(DOT_COLUMNS, n_rows - begin), dk, columns)
        for i in range(begin + 1, n_rows):
            wide_dot(k_beta[i], columns, dk, sums)
            for j in range(begin, min(i, begin + DOT_COLUMNS)):
                scores[i, j] = -sums[j - begin] * decay[i, j]


@kernel
def compute_recursive_attn(n_rows: int, arith: Arith | None, delta: F32Array, scores: F32Array) -> None:
    """Phase 4, recursion: A = (I - B)^-1 by forward substitution in place, then A[i][i] = 1.

    A[i][:k] += B[i][k] * A[k][:k] for k = 1 .. i - 1, rows i ascending. The row's own B is saved in the delta slice
    first, since the updates overwrite it; the diagonal comes last, since the recursion counts on its absence.
    """
    for i in range(1, n_rows):
        for k in range(i):
            delta[0, k] = scores[i, k]
        axpy_prefixes(scores, i, delta[0], arith)
    for i in range(n_rows):
        scores[i, i] = _ONE


@kernel
def attend_row(q_row: F32Array, i: int, arith: Arith | None, k: F32Array, sums: F32Array, decay: F32Array) -> None:
    """Row i of M, one dot after another: fl((q_row . K[j]) * D[i][j]) over D[i][j], for j <= i ascending."""
    for j in range(i + 1):
        decay[i, j] = dot(q_row, k[j, : len(q_row)], sums, arith) * decay[i, j]


@kernel
def attend_columns(q_row: F32Array, i: int, begin: int, columns: F32Array, sums: F32Array, decay: F32Array) -> None:
    """Row i of M for the columns from `begin` on that `columns` holds, up to the diagonal."""
    wide_dot(q_row, columns, len(q_row), sums)
    for j in range(begin, min(i + 1, begin + DOT_COLUMNS)):
        decay[i, j] = sums[j - begin] * decay[i, j]


@kernel
def scale_query_row(q_rows: Words, i: int, kind: int, scale: np.float32, arith: Arith | None, delta: F32Array) -> None:
    """Row i of QS into the delta slice.

    A vector result on the cached path, so settled here too: a number must not depend on its path.
    """
    dk = q_rows.shape[1]
    for d in range(dk):
        delta[0, d] = settle(widen(q_rows[i, d], kind) * scale, arith)


@kernel
def compute_attn_cached(
    n_rows: int,
    arith: Arith | None,
    q_cache: F32Array,
    k: F32Array,
    v: F32Array,
    sums: F32Array,
    decay: F32Array,
) -> None:
    """Phase 4, M over D's lower triangle and diagonal, with rows of QS from the cache; as many dots a time as B."""
    dk = q_cache.shape[1]
    if arith is not None or dk * DOT_COLUMNS > v.size:
        for i in range(n_rows):
            attend_row(q_cache[i], i, arith, k, sums, decay)
        return
    columns = v.reshape(v.size)
    for begin in range(0, n_rows, DOT_COLUMNS):
        transpose(k, begin, min(DOT_COLUMNS, n_rows - begin), dk, columns)
        for i in range(begin, n_rows):
            attend_columns(q_cache[i], i, begin, columns, sums, decay)


@kernel
def compute_attn_reread(
    q_rows: Words,
    kind: int,
    scale: np.float32,
    arith: Arith | None,
    k: F32Array,
    v: F32Array,
    delta: F32Array,
    sums: F32Array,
    decay: F32Array,
) -> None:
    """Phase 4, M over D's lower triangle and diagonal, with each row of QS formed in the delta slice."""
    n_rows, dk = q_rows.shape[0], q_rows.shape[1]
    if arith is not None or dk * DOT_COLUMNS > v.size:
        for i in range(n_rows):
            scale_query_row(q_rows, i, kind, scale, arith, delta)
            attend_row(delta[0, :dk], i, arith, k, sums, decay)
        return
    columns = v.reshape(v.size)
    for begin in range(0, n_rows, DOT_COLUMNS):
        transpose(k, begin, min(DOT_COLUMNS, n_rows - begin), dk, columns)
        for i in range(begin, n_rows):
            scale_query_row(q_rows, i, kind, scale, arith, delta)
            attend_columns(delta[0, :dk], i, begin, columns, sums, decay)


@kernel
def compute_k_cumdecay(
    n_rows: int, dk: int, arith: Arith | None, exp_g: F32Array, scores: F32Array, k_beta: F32Array, k: F32Array
) -> None:
    """Phase 5: KB[i] = fl(KB[i] * E[i]); KC[i] = sum over k <= i ascending of A[i][k] * KB[k], over K's rows."""
    for i in range(n_rows):
        muls(k_beta, i, k_beta, exp_g[0, i], dk, arith)
    for i in range(n_rows):
        duplicate(k, i, _ZERO, dk)
        axpy_chain(k, i, scores[i, : i + 1], k_beta, dk, arith)
