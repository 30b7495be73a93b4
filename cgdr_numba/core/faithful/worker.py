"""Order only: bins in parallel, and in a bin its items, their chunks, their V tiles, the phases."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.faithful import phases_k, phases_v
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.ub import ChunkInput, F32Array, Kinds, Slices, Tile, Words, take_slices
from cgdr_numba.core.jit import Entry, kernel
from cgdr_numba.core.ragged import Sequences, value_to_key_head
from cgdr_numba.core.schedule import ChunkSchedule, UbLayout

_value_to_key_head = kernel(value_to_key_head)


class Operands(NamedTuple):
    """Global memory as words: inputs read-only, results writable."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    """[B, T, Hk, Dk, w]"""
    v: Words
    """[B, T, Hv, Dv, w]"""
    g: Words
    """[B, T, Hv, w]"""
    beta: Words
    """[B, T, Hv, w]"""
    state: Words
    """[N, Hv, Dv, Dk, w]"""
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: Words
    """[N, Hv, Dv, Dk, w]"""


class Call(NamedTuple):
    """The scalars of a call."""

    plan: ChunkSchedule
    dims: Dims
    kinds: Kinds
    scale: np.float32
    arith: Arith


@kernel
def run_v_tile(x: ChunkInput, tile: Tile, place: Any, ub: Slices, arith: Arith) -> None:
    """Steps 1 to 7 of one V tile; `place` holds the states, the output rows and where in its sequence the chunk is."""
    state, workspace, out, final_state, is_first, is_last = place
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    phases_v.load_v_beta(x, tile, ub, arith)
    phases_v.compute_value_new(n_rows, ub, arith)
    if is_first:
        phases_v.load_state_tile(state, x.kinds.state, tile, ub)
    else:
        phases_v.reload_state_tile(workspace, tile, ub)
    phases_v.compute_v_new(n_rows, dk, ub, arith)
    phases_v.compute_attn_inter(x, ub, arith)
    phases_v.accum_output(n_rows, ub, arith)
    phases_v.write_attn_tile(out, x.kinds.qkv, tile, ub, arith)
    phases_v.update_state(x, ub, arith)
    if is_last:
        phases_v.write_final_state(final_state, x.kinds.final_state, tile, ub, arith)
    else:
        phases_v.store_state_tile(workspace, tile, ub)


@kernel
def run_k_side(x: ChunkInput, plan: Any, ub: Slices, arith: Arith) -> None:
    """Phases 1 to 5 of one chunk."""
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    phases_k.load_chunk_key(x, plan, ub)
    phases_k.compute_g_cumsum(x, ub)
    phases_k.compute_k_beta(x, ub, arith)
    phases_k.prepare_decay_and_exp(n_rows, ub, arith)
    phases_k.prepare_attn_query_cache(x, plan, ub, arith)
    phases_k.compute_attn_matrix(x, plan, ub, arith)
    phases_k.compute_k_cumdecay(n_rows, dk, ub, arith)


@kernel
def run_item(
    item: NDArray[np.int64], sequences: Sequences, operands: Operands, call: Call, core: Any
) -> None:
    """All chunks of one (sequence, value head[, V tile]), in order; `core` is the arena's slices and the workspace."""
    ub, workspace = core
    plan, dims = call.plan, call.dims
    n, head, only_tile = item[0], item[1], item[2]
    key_head = _value_to_key_head(head, dims)
    row, length = sequences.row[n], sequences.length[n]
    first_tile, end_tile = (0, plan.n_v_tiles) if only_tile < 0 else (only_tile, only_tile + 1)
    n_chunks = (length + plan.chunk - 1) // plan.chunk
    for c in range(n_chunks):
        begin = sequences.start[n] + c * plan.chunk
        end = sequences.start[n] + min(length, (c + 1) * plan.chunk)
        x = ChunkInput(
            operands.q[row, begin:end, key_head],
            operands.k[row, begin:end, key_head],
            operands.v[row, begin:end, head],
            operands.g[row, begin:end, head],
            operands.beta[row, begin:end, head],
            call.kinds,
            call.scale,
        )
        run_k_side(x, plan, ub, call.arith)
        place = (
            operands.state[n, head],
            workspace[n, head] if n_chunks > 1 else workspace[0, 0],
            operands.out[row, begin:end, head],
            operands.final_state[n, head],
            c == 0,
            c == n_chunks - 1,
        )
        for t in range(first_tile, end_tile):
            v_begin = t * plan.v_step
            is_last_tile = t == plan.n_v_tiles - 1
            tile = Tile(
                v_begin,
                min(plan.v_step, dims.dv - v_begin),
                plan.v_dma_last if is_last_tile else plan.v_dma_full,
            )
            run_v_tile(x, tile, place, ub, call.arith)


def _walk_bins(
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    beta: Words,
    state: Words,
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    plan: ChunkSchedule,
    layout: UbLayout,
    dims: Dims,
    kinds: Kinds,
    arith: Arith,
    scale: np.float32,
    arenas: F32Array,
    workspace: F32Array,
    out: Words,
    final_state: Words,
) -> None:
    """Walk every bin's items in an arena of its own; bins run in parallel and share nothing that they write.

    Flat arguments: numba converts arrays of other strides to the one compiled signature only outside of tuples, and
    takes no tuple of tuples into a parallel loop.
    """
    for b in numba.prange(len(bin_ptr) - 1):
        ub = take_slices(arenas[b], layout, dims.dk)
        call = Call(plan, dims, kinds, scale, arith)
        operands = Operands(q, k, v, g, beta, state, out, final_state)
        sequences = Sequences(row, start, length)
        for i in range(bin_ptr[b], bin_ptr[b + 1]):
            run_item(items[i], sequences, operands, call, (ub, workspace))


def _argument_types() -> tuple[Any, ...]:
    """Return the types of the one signature: words of any strides and alignment, read-only for inputs."""

    def words(n_axes: int, readonly: bool = True) -> Any:
        return types.Array(types.uint16, n_axes, "A", readonly=readonly, aligned=False)

    def floats(n_axes: int) -> Any:
        return types.Array(types.float32, n_axes, "C")

    integers, pairs = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
    tuples = (ChunkSchedule(*[1] * 7), UbLayout(*[1] * 17), Dims(*[1] * 6), Kinds(*[1] * 5), Arith(False, False))
    return (
        *(words(n) for n in (5, 5, 5, 4, 4, 5)),
        *([integers] * 3),
        pairs,
        integers,
        *(numba.typeof(example) for example in tuples),
        types.float32,
        floats(2),
        floats(4),
        words(5, readonly=False),
        words(5, readonly=False),
    )


walk_bins = Entry(_walk_bins, _argument_types)
"""The compiled worker."""
