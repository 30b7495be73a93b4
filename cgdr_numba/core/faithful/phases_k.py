"""Phases 1 to 5: the K side of a chunk, once for every (sequence, value head, chunk).

Every function writes UB slices only; L is the chunk's number of rows, Dk the width of its keys.
"""

from typing import Any

import numpy as np

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.dtypes import half_to_f32, widen
from cgdr_numba.core.faithful.arith import Arith, settle
from cgdr_numba.core.faithful.ub import ChunkInput, F32Array, Slices, Words
from cgdr_numba.core.faithful.vector_ops import axpy_chain, axpy_prefixes, dot, duplicate, exp, muls, sub
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
def load_chunk_key(x: ChunkInput, plan: Any, ub: Slices) -> None:
    """Phase 1: K[i][d] = widen(k[i][d]), by DMA through fp16 staging in the v slice or element by element."""
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    if n_rows <= plan.k_dma_rows:
        stage_rows(x.k, ub.v_half)
        for i in range(n_rows):
            for d in range(dk):
                ub.k[i, d] = half_to_f32(np.uint32(ub.v_half[i * dk + d]))
    else:
        for i in range(n_rows):
            for d in range(dk):
                ub.k[i, d] = widen(x.k[i, d], x.kinds.qkv)


@kernel
def compute_g_cumsum(x: ChunkInput, ub: Slices) -> None:
    """Phase 1b: G[i] = fl(G[i-1] + g[i]) from 0, by the scalar unit; g is rounded to float32 as it is read."""
    total = _ZERO
    for i in range(x.g.shape[0]):
        total = total + widen(x.g[i], x.kinds.g)
        ub.g_cum[0, i] = total


@kernel
def compute_k_beta(x: ChunkInput, ub: Slices, arith: Arith) -> None:
    """Phase 2: KB[i] = fl(K[i] * beta[i])."""
    for i in range(x.k.shape[0]):
        muls(ub.k_beta, i, ub.k, widen(x.beta[i], x.kinds.beta), x.k.shape[1], arith)


@kernel
def prepare_decay_and_exp(n_rows: int, ub: Slices, arith: Arith) -> None:
    """Phase 3: E = Exp(G); D[i][j] = Exp(fl(G[i] - G[j])) for all 64 columns j.

    Reads G[L .. 63], stale, into lanes of E and D that nobody reads. The upper triangle may overflow; the consumers'
    loop bounds keep it out. The multiplication by 1 hands G from the scalar to the vector unit.
    """
    muls(ub.g_cum, 0, ub.g_cum, _ONE, CHUNK, arith)
    exp(ub.exp_g, 0, ub.g_cum, CHUNK, arith)
    for i in range(n_rows):
        duplicate(ub.delta, 0, ub.g_cum[0, i], CHUNK)
        sub(ub.delta, 0, ub.g_cum, CHUNK, arith)
        exp(ub.decay, i, ub.delta, CHUNK, arith)


@kernel
def prepare_attn_query_cache(x: ChunkInput, plan: Any, ub: Slices, arith: Arith) -> None:
    """Phase 3.5: QS[i][d] = fl(widen(q[i][d]) * scale) into the output slice, where all L rows fit there."""
    n_rows, dk = x.q.shape[0], x.q.shape[1]
    if n_rows <= plan.q_cache_rows:
        stage_rows(x.q, ub.v_half)
        for i in range(n_rows):
            for d in range(dk):
                ub.q_cache[i, d] = half_to_f32(np.uint32(ub.v_half[i * dk + d]))
            muls(ub.q_cache, i, ub.q_cache, x.scale, dk, arith)


@kernel
def compute_attn_matrix(x: ChunkInput, plan: Any, ub: Slices, arith: Arith) -> None:
    """Phase 4: A in the scores slice, then M over D's lower triangle.

    B[i][j] = fl(-(KB[i] . K[j]) * D[i][j]) for j < i; A = (I - B)^-1 by rows; A[i][i] = 1, after the recursion;
    M[i][j] = fl((QS[i] . K[j]) * D[i][j]) for j <= i. Without the cache each row of QS is formed in the delta slice.
    """
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    for i in range(1, n_rows):
        for j in range(i):
            product = dot(ub.k_beta[i, :dk], ub.k[j, :dk], ub.dot, arith)
            ub.scores[i, j] = -product * ub.decay[i, j]
    compute_recursive_attn(n_rows, ub, arith)
    for i in range(n_rows):
        ub.scores[i, i] = _ONE
    for i in range(n_rows):
        if n_rows <= plan.q_cache_rows:
            attend_row(ub.q_cache[i], i, ub, arith)
        else:
            for d in range(dk):
                # A vector result on the cached path, so settled here too: a number must not depend on its path.
                ub.delta[0, d] = settle(widen(x.q[i, d], x.kinds.qkv) * x.scale, arith)
            attend_row(ub.delta[0, :dk], i, ub, arith)


@kernel
def attend_row(q_row: F32Array, i: int, ub: Slices, arith: Arith) -> None:
    """Row i of M: fl((q_row . K[j]) * D[i][j]) over D[i][j], for j <= i ascending."""
    for j in range(i + 1):
        ub.decay[i, j] = dot(q_row, ub.k[j, : len(q_row)], ub.dot, arith) * ub.decay[i, j]


@kernel
def compute_recursive_attn(n_rows: int, ub: Slices, arith: Arith) -> None:
    """Forward substitution in place: A[i][:k] += B[i][k] * A[k][:k] for k = 1 .. i - 1, rows i ascending.

    The row's own B is saved in the delta slice first: the updates overwrite it.
    """
    for i in range(1, n_rows):
        for k in range(i):
            ub.delta[0, k] = ub.scores[i, k]
        axpy_prefixes(ub.scores, i, ub.delta[0], arith)


@kernel
def compute_k_cumdecay(n_rows: int, dk: int, ub: Slices, arith: Arith) -> None:
    """Phase 5: KB[i] = fl(KB[i] * E[i]); KC[i] = sum over k <= i ascending of A[i][k] * KB[k], over K's rows."""
    for i in range(n_rows):
        muls(ub.k_beta, i, ub.k_beta, ub.exp_g[0, i], dk, arith)
    for i in range(n_rows):
        duplicate(ub.k, i, _ZERO, dk)
        axpy_chain(ub.k, i, ub.scores[i, : i + 1], ub.k_beta, dk, arith)


__all__ = [
    "compute_attn_matrix",
    "compute_g_cumsum",
    "compute_k_beta",
    "compute_k_cumdecay",
    "load_chunk_key",
    "prepare_attn_query_cache",
    "prepare_decay_and_exp",
]

