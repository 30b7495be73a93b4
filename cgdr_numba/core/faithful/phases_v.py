"""Phase 6, steps 1 to 7: the V side of a chunk, once for every V tile.

Parameters as on the K side. Vector operations run over the tile's padded width; lanes behind the tile's columns are 0
or meaningless, never read.
"""

import numpy as np

from cgdr_numba.core.dtypes import FP16, widen
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.phases_k import cast_rows, read_rows, stage_rows
from cgdr_numba.core.faithful.scalar_ops import scalar_exp
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.vector_ops import add, axpy_chain, cast_out, duplicate, muls
from cgdr_numba.core.jit import kernel

_ZERO = np.float32(0.0)
_MINUS_ONE = np.float32(-1.0)


@kernel
def clear(y: F32Array) -> None:
    """Duplicate of 0 over a whole slice."""
    for i in range(y.shape[0]):
        duplicate(y, i, _ZERO, y.shape[1])


@kernel
def copy_columns(x: F32Array, y: F32Array, n_rows: int, n_columns: int) -> None:
    """Strided DMA of floats: y[:n_rows, :n_columns] = x[:n_rows, :n_columns]."""
    for i in range(n_rows):
        for c in range(n_columns):
            y[i, c] = x[i, c]


@kernel
def load_v(v_rows: Words, kind: int, by_dma: bool, attn_half: Words, v: F32Array) -> None:
    """Step 1, load: V[i][c] = widen(v[i][c]) into the cleared tile, by DMA through the output slice or not."""
    clear(v)
    if by_dma:
        stage_rows(v_rows, attn_half)
        cast_rows(attn_half, v_rows.shape[0], v_rows.shape[1], v)
    else:
        read_rows(v_rows, kind, v)


@kernel
def scale_v_by_beta(beta_rows: Words, kind: int, arith: Arith | None, v: F32Array) -> None:
    """Step 1: VB[i] = fl(V[i] * beta[i])."""
    for i in range(beta_rows.shape[0]):
        muls(v, i, v, widen(beta_rows[i], kind), v.shape[1], arith)


@kernel
def compute_value_new(n_rows: int, arith: Arith | None, scores: F32Array, v: F32Array, attn_out: F32Array) -> None:
    """Step 2: U[i] = sum over k <= i ascending of A[i][k] * VB[k]. The last use of A for a tile."""
    for i in range(n_rows):
        duplicate(attn_out, i, _ZERO, attn_out.shape[1])
        axpy_chain(attn_out, i, scores[i, : i + 1], v, attn_out.shape[1], arith)


@kernel
def load_state_tile(state_rows: Words, kind: int, state: F32Array) -> None:
    """Step 3 of a first chunk: S cleared, then S[d][c] = widen(state_rows[c][d]), transposing [columns, Dk, w]."""
    clear(state)
    for c in range(state_rows.shape[0]):
        for d in range(state_rows.shape[1]):
            state[d, c] = widen(state_rows[c, d], kind)


@kernel
def reload_state_tile(workspace: F32Array, state: F32Array) -> None:
    """Step 3 of a later chunk: S cleared, then the tile's FP32 columns [Dk, columns] of the workspace."""
    clear(state)
    copy_columns(workspace, state, workspace.shape[0], workspace.shape[1])


@kernel
def compute_v_new(
    n_rows: int, dk: int, arith: Arith | None, k: F32Array, state: F32Array, attn_out: F32Array, v: F32Array
) -> None:
    """Step 4: W[i] = sum over d ascending of KC[i][d] * S[d]; VN[i] = fl(U[i] + (-W[i])), over VB's rows."""
    width = v.shape[1]
    for i in range(n_rows):
        duplicate(v, i, _ZERO, width)
        axpy_chain(v, i, k[i, :dk], state, width, arith)
        muls(v, i, v, _MINUS_ONE, width, arith)
        add(v, i, attn_out, width, arith)


@kernel
def compute_attn_inter(
    q_rows: Words,
    kind: int,
    scale: np.float32,
    arith: Arith | None,
    exp_g: F32Array,
    state: F32Array,
    delta: F32Array,
    attn_out: F32Array,
) -> None:
    """Step 5: O[i] = sum over d ascending of fl(fl(widen(q[i][d]) * scale) * E[i]) * S[d].

    q comes from global memory again: its cache and K are gone. The coefficients, which the NPU's scalar unit forms
    one at a time, wait in the delta slice.
    """
    dk, width = q_rows.shape[1], attn_out.shape[1]
    for i in range(q_rows.shape[0]):
        for d in range(dk):
            delta[0, d] = widen(q_rows[i, d], kind) * scale * exp_g[0, i]
        duplicate(attn_out, i, _ZERO, width)
        axpy_chain(attn_out, i, delta[0, :dk], state, width, arith)


@kernel
def accum_output(n_rows: int, arith: Arith | None, decay: F32Array, v: F32Array, attn_out: F32Array) -> None:
    """Step 6: O[i] += M[i][j] * VN[j] for j <= i ascending, into the sums of step 5."""
    for i in range(n_rows):
        axpy_chain(attn_out, i, decay[i, : i + 1], v, attn_out.shape[1], arith)


@kernel
def write_attn_tile(attn_out: F32Array, kind: int, arith: Arith | None, out_queue: Words, out_rows: Words) -> None:
    """Step 6, output: out[i][c] = cast(O[i][c]); fp16 goes through the output queue, other dtypes directly.

    out_rows is [L, columns, w]. Rows end where the tile ends (the NPU rounds a row up to 16 halves).
    """
    width = attn_out.shape[1]
    for i in range(out_rows.shape[0]):
        for c in range(out_rows.shape[1]):
            slot = i * width + c
            if kind == FP16:
                cast_out(attn_out[i, c], kind, out_queue[slot : slot + 1], arith)
                out_rows[i, c, 0] = out_queue[slot]
            else:
                cast_out(attn_out[i, c], kind, out_rows[i, c], arith)


@kernel
def update_state(
    k_rows: Words,
    kind: int,
    arith: Arith | None,
    exp_g: F32Array,
    g_cum: F32Array,
    v: F32Array,
    delta: F32Array,
    factors: F32Array,
    state: F32Array,
) -> None:
    """Step 7: S[d] = fl(S[d] * E[L-1]); then S[d] += fl(widen(k[i][d]) * ScalarExp(G[L-1] - G[i])) * VN[i].

    Every element of S sees i ascending; the NPU walks d inside of i, which is the same sequence. The decay is the
    vector unit's Exp, the keys' factor the scalar unit's; k comes from global memory again. Factors wait in the dot
    slice, coefficients in the delta slice.
    """
    n_rows, dk = k_rows.shape[0], k_rows.shape[1]
    last = n_rows - 1
    for d in range(dk):
        muls(state, d, state, exp_g[0, last], state.shape[1], arith)
    for i in range(n_rows):
        factors[i] = scalar_exp(g_cum[0, last] - g_cum[0, i])
    for d in range(dk):
        for i in range(n_rows):
            delta[0, i] = widen(k_rows[i, d], kind) * factors[i]
        axpy_chain(state, d, delta[0, :n_rows], v, state.shape[1], arith)


@kernel
def store_state_tile(state: F32Array, workspace: F32Array) -> None:
    """Step 7, a chunk follows: S to the tile's FP32 columns [Dk, columns] of the workspace, no rounding."""
    copy_columns(state, workspace, workspace.shape[0], workspace.shape[1])


@kernel
def write_final_state(state: F32Array, kind: int, arith: Arith | None, out_queue: Words, final_rows: Words) -> None:
    """Step 7, last chunk: final_state[c][d] = cast(S[d][c]), transposing back to [columns, Dk, w]."""
    width = state.shape[1]
    for d in range(final_rows.shape[1]):
        for c in range(final_rows.shape[0]):
            slot = d * width + c
            if kind == FP16:
                cast_out(state[d, c], kind, out_queue[slot : slot + 1], arith)
                final_rows[c, d, 0] = out_queue[slot]
            else:
                cast_out(state[d, c], kind, final_rows[c, d], arith)
