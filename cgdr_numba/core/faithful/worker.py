"""Order only: bins in parallel, and in a bin its items, their chunks, their V tiles, the phases."""

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, SEQUENCES, Entry, caller_array
from cgdr_numba.core.faithful import phases_k, phases_v
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.ub import F32Array, Kinds, Slices, Tile, Words, take_slices
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.ragged import Sequences, value_to_key_head
from cgdr_numba.core.schedule import ChunkSchedule, UbLayout

_value_to_key_head = kernel(value_to_key_head)


class Call(NamedTuple):
    """The scalars of a call."""

    plan: ChunkSchedule
    layout: UbLayout
    dims: Dims
    kinds: Kinds
    scale: np.float32
    arith: Arith | None


class Arguments(NamedTuple):
    """What a call gives: global memory as words, inputs read-only and results writable, and its plan."""

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
    sequences: Sequences
    items: NDArray[np.int64]
    """[n, 3]; (sequence, value head, V tile or -1 for all)."""
    bin_ptr: NDArray[np.int64]
    """[bins + 1]; where the items of a bin begin."""
    call: Call
    arenas: F32Array
    """[bins, floats]"""
    workspace: F32Array
    """[N, Hv, Dk, ceil8(Dv)]; states between chunks."""
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: Words
    """[N, Hv, Dv, Dk, w]"""


class ChunkInput(NamedTuple):
    """Global memory of one (sequence, value head, chunk): the chunk's rows only."""

    q: Words
    """[L, Dk, w]"""
    k: Words
    """[L, Dk, w]"""
    v: Words
    """[L, Dv, w]"""
    g: Words
    """[L, w]"""
    beta: Words
    """[L, w]"""


@kernel
def run_k_side(x: ChunkInput, call: Call, ub: Slices) -> None:
    """Phases 1 to 5 of one chunk."""
    kinds, arith = call.kinds, call.arith
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    q_cached = n_rows <= call.plan.q_cache_rows
    phases_k.load_chunk_key(x.k, kinds.qkv, n_rows <= call.plan.k_dma_rows, ub.v_half, ub.k)
    phases_k.compute_g_cumsum(x.g, kinds.g, ub.g_cum)
    phases_k.compute_k_beta(x.beta, kinds.beta, dk, arith, ub.k, ub.k_beta)
    phases_k.prepare_decay_and_exp(n_rows, arith, ub.g_cum, ub.delta, ub.exp_g, ub.decay)
    if q_cached:
        phases_k.prepare_attn_query_cache(x.q, call.scale, arith, ub.v_half, ub.q_cache)
    phases_k.compute_scores(n_rows, dk, arith, ub.k_beta, ub.k, ub.decay, ub.v, ub.dot, ub.scores)
    phases_k.compute_recursive_attn(n_rows, arith, ub.delta, ub.scores)
    if q_cached:
        phases_k.compute_attn_cached(n_rows, arith, ub.q_cache, ub.k, ub.v, ub.dot, ub.decay)
    else:
        phases_k.compute_attn_reread(x.q, kinds.qkv, call.scale, arith, ub.k, ub.v, ub.delta, ub.dot, ub.decay)
    phases_k.compute_k_cumdecay(n_rows, dk, arith, ub.exp_g, ub.scores, ub.k_beta, ub.k)


class Place(NamedTuple):
    """Where a chunk of one (sequence, value head) takes its state from and puts its results."""

    state: Words
    """[Dv, Dk, w]"""
    workspace: F32Array
    """[Dk, ceil8(Dv)]"""
    out: Words
    """[L, Dv, w]"""
    final_state: Words
    """[Dv, Dk, w]"""
    is_first: bool
    is_last: bool


@kernel
def run_v_tile(x: ChunkInput, tile: Tile, place: Place, call: Call, ub: Slices) -> None:
    """Steps 1 to 7 of one V tile."""
    kinds, arith = call.kinds, call.arith
    n_rows, dk = x.k.shape[0], x.k.shape[1]
    phases_v.load_v(x.v[:, tile.begin : tile.end], kinds.qkv, tile.by_dma, ub.attn_half, ub.v)
    phases_v.scale_v_by_beta(x.beta, kinds.beta, arith, ub.v)
    phases_v.compute_value_new(n_rows, arith, ub.scores, ub.v, ub.attn_out)
    if place.is_first:
        phases_v.load_state_tile(place.state[tile.begin : tile.end], kinds.state, ub.state)
    else:
        phases_v.reload_state_tile(place.workspace[:, tile.begin : tile.padded_end], ub.state)
    phases_v.compute_v_new(n_rows, dk, arith, ub.k, ub.state, ub.attn_out, ub.v)
    phases_v.compute_attn_inter(x.q, kinds.qkv, call.scale, arith, ub.exp_g, ub.state, ub.delta, ub.attn_out)
    phases_v.accum_output(n_rows, arith, ub.decay, ub.v, ub.attn_out)
    phases_v.write_attn_tile(ub.attn_out, kinds.qkv, arith, ub.out_queue, place.out[:, tile.begin : tile.end])
    phases_v.update_state(x.k, kinds.qkv, arith, ub.exp_g, ub.g_cum, ub.v, ub.delta, ub.dot, ub.state)
    if place.is_last:
        final_rows = place.final_state[tile.begin : tile.end]
        phases_v.write_final_state(ub.state, kinds.final_state, arith, ub.out_queue, final_rows)
    else:
        phases_v.store_state_tile(ub.state, place.workspace[:, tile.begin : tile.padded_end])


@kernel
def tile_at(t: int, plan: ChunkSchedule, dv: int) -> Tile:
    """Return V tile t of a head."""
    begin = t * plan.v_step
    end = min(begin + plan.v_step, dv)
    by_dma = (plan.v_dma_last if t == plan.n_v_tiles - 1 else plan.v_dma_full) > 0
    return Tile(begin, end, (end + 7) // 8 * 8, by_dma)


@kernel
def run_item(item: NDArray[np.int64], a: Arguments, arena: F32Array) -> None:
    """All chunks of one (sequence, value head[, V tile]), in order, in one arena."""
    call, sequences = a.call, a.sequences
    plan, dims = call.plan, call.dims
    ub = take_slices(arena, call.layout, dims.dk)
    n, head, only_tile = item[0], item[1], item[2]
    key_head = _value_to_key_head(head, dims)
    row, start, length = sequences.row[n], sequences.start[n], sequences.length[n]
    first_tile, end_tile = (0, plan.n_v_tiles) if only_tile < 0 else (only_tile, only_tile + 1)
    n_chunks = (length + plan.chunk - 1) // plan.chunk
    for c in range(n_chunks):
        begin, end = start + c * plan.chunk, start + min(length, (c + 1) * plan.chunk)
        x = ChunkInput(
            a.q[row, begin:end, key_head],
            a.k[row, begin:end, key_head],
            a.v[row, begin:end, head],
            a.g[row, begin:end, head],
            a.beta[row, begin:end, head],
        )
        place = Place(
            a.state[n, head],
            a.workspace[n, head] if n_chunks > 1 else a.workspace[0, 0],
            a.out[row, begin:end, head],
            a.final_state[n, head],
            c == 0,
            c == n_chunks - 1,
        )
        run_k_side(x, call, ub)
        for t in range(first_tile, end_tile):
            run_v_tile(x, tile_at(t, plan, dims.dv), place, call, ub)


def _run_bin(b: int, a: Arguments) -> None:
    """All items of bin b, one after another, in one arena."""
    for i in range(a.bin_ptr[b], a.bin_ptr[b + 1]):
        run_item(a.items[i], a, a.arenas[b])


def _argument_types(arith: Arith | None) -> Arguments:
    """Return the types of the one signature."""
    q, gate, states = (caller_array(types.uint16, n_axes) for n_axes in (5, 4, 5))
    scalars = Call(ChunkSchedule(*[1] * 7), UbLayout(*[1] * 17), Dims(*[1] * 6), Kinds(*[1] * 5), np.float32(1), arith)
    result = caller_array(types.uint16, 5, readonly=False)
    values = (
        q,
        q,
        q,
        gate,
        gate,
        states,
        SEQUENCES,
        ITEMS,
        INTEGERS,
        numba.typeof(scalars),
        ARENAS,
        types.Array(types.float32, 4, "C"),
        result,
        result,
    )
    return Arguments._make(values)


walk_bins = Entry(_run_bin, lambda: _argument_types(None))
"""The worker for the default arithmetic."""
walk_bins_optioned = Entry(_run_bin, lambda: _argument_types(Arith(False, False)))
"""The worker for fused or saturating arithmetic, as its `arith` says."""
