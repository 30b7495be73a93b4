"""Phase 6, steps 1 to 7: the V side of a chunk, once for every V tile.

Vector operations run over the tile's padded width; lanes behind the tile's columns are 0 or meaningless, never read.
"""

import numpy as np

from cgdr_numba.core.dtypes import FP16, half_to_f32, widen
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.phases_k import stage_rows
from cgdr_numba.core.faithful.scalar_ops import scalar_exp
from cgdr_numba.core.faithful.ub import ChunkInput, F32Array, Slices, Tile, Words
from cgdr_numba.core.faithful.vector_ops import add, axpy_chain, axpy_outer, cast_out, duplicate, muls
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)
_MINUS_ONE = np.float32(-1.0)


@kernel
def load_v_beta(x: ChunkInput, tile: Tile, ub: Slices, arith: Arith) -> None:
    """Step 1: VB[i] = fl(widen(v[i]) * beta[i]); the tile is cleared first. By DMA through the output slice or not."""
    n_rows, n_columns, width = x.v.shape[0], tile.n_columns, ub.v.shape[1]
    columns = x.v[:, tile.begin : tile.begin + n_columns]
    if tile.by_dma:
        stage_rows(columns, ub.attn_half)
    for i in range(n_rows):
        duplicate(ub.v, i, _ZERO, width)
        for c in range(n_columns):
            if tile.by_dma:
                ub.v[i, c] = half_to_f32(np.uint32(ub.attn_half[i * n_columns + c]))
            else:
                ub.v[i, c] = widen(columns[i, c], x.kinds.qkv)
        muls(ub.v, i, ub.v, widen(x.beta[i], x.kinds.beta), width, arith)


@kernel
def compute_value_new(n_rows: int, ub: Slices, arith: Arith) -> None:
    """Step 2: U[i] = sum over k <= i ascending of A[i][k] * VB[k]. The last use of A for a tile."""
    for i in range(n_rows):
        duplicate(ub.attn_out, i, _ZERO, ub.attn_out.shape[1])
        axpy_chain(ub.attn_out, i, ub.scores[i, : i + 1], ub.v, ub.attn_out.shape[1], arith)


@kernel
def load_state_tile(state: Words, kind: int, tile: Tile, ub: Slices) -> None:
    """Step 3 of a first chunk: S cleared, then S[d][c] = widen(state[c][d]), transposing [Dv, Dk, w]."""
    for d in range(ub.state.shape[0]):
        duplicate(ub.state, d, _ZERO, ub.state.shape[1])
    for c in range(tile.n_columns):
        for d in range(state.shape[1]):
            ub.state[d, c] = widen(state[tile.begin + c, d], kind)


@kernel
def reload_state_tile(workspace: F32Array, tile: Tile, ub: Slices) -> None:
    """Step 3 of a later chunk: S cleared, then copied in FP32 from the workspace [Dk, stride]."""
    n_columns = (tile.n_columns + 7) // 8 * 8
    for d in range(ub.state.shape[0]):
        duplicate(ub.state, d, _ZERO, ub.state.shape[1])
    for d in range(workspace.shape[0]):
        for c in range(n_columns):
            ub.state[d, c] = workspace[d, tile.begin + c]


@kernel
def compute_v_new(n_rows: int, dk: int, ub: Slices, arith: Arith) -> None:
    """Step 4: W[i] = sum over d ascending of KC[i][d] * S[d]; VN[i] = fl(U[i] + (-W[i])), over VB's rows."""
    width = ub.v.shape[1]
    for i in range(n_rows):
        duplicate(ub.v, i, _ZERO, width)
        axpy_chain(ub.v, i, ub.k[i, :dk], ub.state, width, arith)
        muls(ub.v, i, ub.v, _MINUS_ONE, width, arith)
        add(ub.v, i, ub.attn_out, width, arith)


@kernel
def compute_attn_inter(x: ChunkInput, ub: Slices, arith: Arith) -> None:
    """Step 5: O[i] = sum over d ascending of fl(fl(widen(q[i][d]) * scale) * E[i]) * S[d].

    q comes from global memory again: its cache and K are gone. The coefficients, which the NPU's scalar unit forms
    one at a time, wait in the delta slice.
    """
    dk, width = x.q.shape[1], ub.attn_out.shape[1]
    for i in range(x.q.shape[0]):
        for d in range(dk):
            ub.delta[0, d] = widen(x.q[i, d], x.kinds.qkv) * x.scale * ub.exp_g[0, i]
        duplicate(ub.attn_out, i, _ZERO, width)
        axpy_chain(ub.attn_out, i, ub.delta[0, :dk], ub.state, width, arith)


@kernel
def accum_output(n_rows: int, ub: Slices, arith: Arith) -> None:
    """Step 6: O[i] += M[i][j] * VN[j] for j <= i ascending, into the sums of step 5."""
    for i in range(n_rows):
        axpy_chain(ub.attn_out, i, ub.decay[i, : i + 1], ub.v, ub.attn_out.shape[1], arith)


@kernel
def write_attn_tile(out: Words, kind: int, tile: Tile, ub: Slices, arith: Arith) -> None:
    """Step 6, output: out[i][c] = cast(O[i][c]); fp16 goes through the output queue, other dtypes directly.

    out is [L, Dv, w] of this chunk and head. Rows end where the tile ends (the NPU rounds a row up to 16 halves).
    """
    width = ub.attn_out.shape[1]
    for i in range(out.shape[0]):
        for c in range(tile.n_columns):
            if kind == FP16:
                slot = i * width + c
                cast_out(ub.attn_out[i, c], kind, ub.out_queue[slot : slot + 1], arith)
                out[i, tile.begin + c, 0] = ub.out_queue[slot]
            else:
                cast_out(ub.attn_out[i, c], kind, out[i, tile.begin + c], arith)


@kernel
def update_state(x: ChunkInput, ub: Slices, arith: Arith) -> None:
    """Step 7: S[d] = fl(S[d] * E[L-1]); then S[d] += fl(widen(k[i][d]) * ScalarExp(G[L-1] - G[i])) * VN[i].

    Rows i ascending outside, d ascending inside. The decay is the vector unit's Exp, the keys' factor the scalar
    unit's; k comes from global memory again.
    """
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    last = n_rows - 1
    for d in range(dk):
        muls(ub.state, d, ub.state, ub.exp_g[0, last], ub.state.shape[1], arith)
    for i in range(n_rows):
        factor = scalar_exp(ub.g_cum[0, last] - ub.g_cum[0, i])
        for d in range(dk):
            ub.delta[0, d] = widen(x.k[i, d], x.kinds.qkv) * factor
        axpy_outer(ub.state, ub.delta[0, :dk], ub.v, i, arith)


@kernel
def store_state_tile(workspace: F32Array, tile: Tile, ub: Slices) -> None:
    """Step 7, a later chunk follows: S to the workspace [Dk, stride] in FP32, no rounding."""
    n_columns = (tile.n_columns + 7) // 8 * 8
    for d in range(workspace.shape[0]):
        for c in range(n_columns):
            workspace[d, tile.begin + c] = ub.state[d, c]


@kernel
def write_final_state(final_state: Words, kind: int, tile: Tile, ub: Slices, arith: Arith) -> None:
    """Step 7, last chunk: final_state[c][d] = cast(S[d][c]), transposing back to [Dv, Dk, w]."""
    width = ub.state.shape[1]
    for d in range(final_state.shape[1]):
        for c in range(tile.n_columns):
            if kind == FP16:
                slot = d * width + c
                cast_out(ub.state[d, c], kind, ub.out_queue[slot : slot + 1], arith)
                final_state[tile.begin + c, d, 0] = ub.out_queue[slot]
            else:
                cast_out(ub.state[d, c], kind, final_state[tile.begin + c, d], arith)
