"""One core's unified buffer in a call over a pool: the ledger's queues and slices as views.

A V tile of states lies as blocks of 16 rows v, each block [Dk rounded up to 16, 16]: sixteen dots of a vector with rows
of the state then run side by side, each in the kernel's order. Lanes behind Dk and rows behind the tile's last are 0.
"""

from typing import NamedTuple

import numpy as np

from cgdr_numba.core.dims import MAX_STEP_TOKENS, Dims
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.schedule import PoolLayout, PoolSchedule


class PoolSlices(NamedTuple):
    """Views of one arena at the ledger's offsets. Queue buffers hold 16-bit words."""

    state_queue: Words
    """[v_step * align_k]; a state tile on its way in, rows v."""
    state_out: Words
    """[depth, v_step * align_k]; state tiles on their way out, rows v."""
    attn_out: Words
    """[depth, v_step]; outputs on their way out."""
    attn: F32Array
    """[v_step]; o of a token."""
    v: F32Array
    """[8, align_v]"""
    q: F32Array
    """[8, align_k]; scale q."""
    k: F32Array
    """[8, align_k]"""
    state: F32Array
    """[v_step / 16, align_k * 16]; the state tile S in blocks."""
    product: F32Array
    """[v_step * align_k]; products of a dot, or sixteen sums."""
    beta: F32Array
    """[1, 8 Hv]; a sequence's tokens, heads within."""
    g: F32Array
    """[1, 8 Hv]; e^g in the same order."""
    gk: F32Array
    """[1, 8 Hv] e^gk in the same order where gk is scalar; [8, align_k] where it is a vector."""


class PoolKinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    """q, k, v and out."""
    g: int
    gk: int
    beta: int
    pool: int


class PoolTile(NamedTuple):
    """Rows [begin, end) of a head's state, and how many blocks of 16 they take."""

    begin: int
    end: int
    n_blocks: int


@kernel
def take_pool_slices(arena: F32Array, layout: PoolLayout, plan: PoolSchedule, dims: Dims) -> PoolSlices:
    """Return the queues and slices of one arena (flat floats) at the layout's offsets."""
    key, wide, width = layout.align_k, layout.align_v, plan.v_step
    size, heads = width * key, MAX_STEP_TOKENS * dims.hv
    gk_rows, gk_columns = (MAX_STEP_TOKENS, key) if plan.has_vector_gk else (1, heads)
    n_queued, n_attn = plan.state_depth * size, plan.attn_depth * width
    n_gk = gk_rows * gk_columns
    return PoolSlices(
        arena[layout.state_queue : layout.state_queue + size // 2].view(np.uint16),
        arena[layout.state_out : layout.state_out + n_queued // 2].view(np.uint16).reshape(plan.state_depth, size),
        arena[layout.attn_out : layout.attn_out + n_attn // 2].view(np.uint16).reshape(plan.attn_depth, width),
        arena[layout.attn : layout.attn + width],
        arena[layout.v : layout.v + MAX_STEP_TOKENS * wide].reshape(MAX_STEP_TOKENS, wide),
        arena[layout.q : layout.q + MAX_STEP_TOKENS * key].reshape(MAX_STEP_TOKENS, key),
        arena[layout.k : layout.k + MAX_STEP_TOKENS * key].reshape(MAX_STEP_TOKENS, key),
        arena[layout.state : layout.state + size].reshape(width // DOT_COLUMNS, key * DOT_COLUMNS),
        arena[layout.product : layout.product + size],
        arena[layout.beta : layout.beta + heads].reshape(1, heads),
        arena[layout.g : layout.g + heads].reshape(1, heads),
        arena[layout.gk : layout.gk + n_gk].reshape(gk_rows, gk_columns),
    )
