"""Order only: cores in parallel, on a core its (sequence, value head) items, their V tiles, the tokens of a tile."""

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, SEQUENCES, Entry, caller_array
from cgdr_numba.core.faithful import pool_phases as phases
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.pool_ub import PoolKinds, PoolSlices, PoolTile, take_pool_slices
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.ragged import Sequences, value_to_key_head
from cgdr_numba.core.schedule import PoolLayout, PoolSchedule

_value_to_key_head = kernel(value_to_key_head)


class PoolCall(NamedTuple):
    """The scalars of a call."""

    plan: PoolSchedule
    layout: PoolLayout
    dims: Dims
    kinds: PoolKinds
    scale: np.float32
    arith: Arith | None


class PoolArguments(NamedTuple):
    """What a call gives: global memory as words, inputs read-only, out and the pool writable, and its plan."""

    q: Words
    """[T, Hk, Dk, w]"""
    k: Words
    """[T, Hk, Dk, w]"""
    v: Words
    """[T, Hv, Dv, w]"""
    g: Words
    """[T, Hv, w]"""
    gk: Words
    """[T, Hv, Dk, w] where gk is a vector, [T, Hv, 1, w] where it is scalar."""
    beta: Words
    """[T, Hv, w]"""
    sequences: Sequences
    read_slot: NDArray[np.int64]
    """[N]; the state that a sequence begins with."""
    write_slot: NDArray[np.int64]
    """[T]; where the state after a token goes."""
    items: NDArray[np.int64]
    """[n, 2]; (sequence, value head)"""
    ptr: NDArray[np.int64]
    """[cores + 1]; where the items of a core begin."""
    call: PoolCall
    arenas: F32Array
    """[cores, floats]"""
    out: Words
    """[T, Hv, Dv, w]"""
    pool: Words
    """[slots, Hv, Dv, Dk, w]"""


class HeadPlace(NamedTuple):
    """One value head of a sequence: its tokens [begin, end) and the slot that its state comes from."""

    begin: int
    end: int
    head: int
    read_slot: int


@kernel
def load_sequence(x: PoolArguments, begin: int, end: int, call: PoolCall, ub: PoolSlices) -> None:
    """What a core loads at its first head of a sequence, for all heads: beta, e^g and a scalar e^gk."""
    phases.load_head_values(x.beta[begin:end], call.kinds.beta, ub.beta)
    if call.plan.has_g:
        phases.load_decays(x.g[begin:end], call.kinds.g, call.arith, ub.g)
    if call.plan.has_scalar_gk:
        phases.load_decays(x.gk[begin:end, :, 0], call.kinds.gk, call.arith, ub.gk)


@kernel
def load_head(x: PoolArguments, at: HeadPlace, call: PoolCall, ub: PoolSlices) -> None:
    """What a core loads once a head: q, k and v of all tokens, and a vector e^gk."""
    kinds, key_head = call.kinds, _value_to_key_head(at.head, call.dims)
    phases.load_rows(x.q[at.begin : at.end, key_head], kinds.qkv, ub.q)
    phases.scale_query(at.end - at.begin, call.dims.dk, call.scale, call.arith, ub.q)
    phases.load_rows(x.k[at.begin : at.end, key_head], kinds.qkv, ub.k)
    phases.load_rows(x.v[at.begin : at.end, at.head], kinds.qkv, ub.v)
    if call.plan.has_vector_gk:
        phases.load_column_decays(x.gk[at.begin : at.end, at.head], kinds.gk, call.arith, ub.gk)


@kernel
def compute_token(i: int, at: HeadPlace, tile: PoolTile, call: PoolCall, ub: PoolSlices) -> None:
    """Token i of a sequence on one V tile: decays, the delta rule row by row, then o of all rows."""
    plan, arith, n_blocks, dk = call.plan, call.arith, tile.n_blocks, call.dims.dk
    gate = i * call.dims.hv + at.head
    align_k = call.layout.align_k
    product, sums = ub.product[:align_k], ub.product[align_k : align_k + DOT_COLUMNS]
    if plan.has_g:
        phases.decay_state(ub.g[0, gate], n_blocks, dk, arith, ub.state)
    if plan.has_scalar_gk:
        phases.decay_state(ub.gk[0, gate], n_blocks, dk, arith, ub.state)
    if plan.has_vector_gk:
        phases.decay_columns(ub.gk[i], n_blocks, dk, arith, ub.state)
    phases.learn_rows(ub.k[i], ub.v[i, tile.begin :], ub.beta[0, gate], n_blocks, dk, arith, product, sums, ub.state)
    phases.read_rows_out(ub.q[i], n_blocks, arith, ub.state, product, sums, ub.attn)


@kernel
def run_tokens(x: PoolArguments, at: HeadPlace, tile: PoolTile, call: PoolCall, ub: PoolSlices) -> None:
    """All tokens of one V tile; outputs and states leave through queues.

    A queue of depth 1 is copied out after every token; one of depth 2 when the next token stands, and once more at the
    end: nothing is pending between tiles.
    """
    plan, kinds, align_k = call.plan, call.kinds, call.layout.align_k
    rows = slice(tile.begin, tile.end)
    n_tokens = at.end - at.begin
    for i in range(n_tokens + 1):
        if i < n_tokens:
            t = at.begin + i
            compute_token(i, at, tile, call, ub)
            out_rows, pool_rows = x.out[t, at.head, rows], x.pool[x.write_slot[t], at.head, rows]
            phases.queue_attn(ub.attn, kinds.qkv, call.arith, ub.attn_out[i % plan.attn_depth], out_rows)
            phases.queue_state(ub.state, kinds.pool, align_k, call.arith, ub.state_out[i % plan.state_depth], pool_rows)
        done = i - (plan.attn_depth - 1)
        if 0 <= done < n_tokens:
            phases.copy_attn(ub.attn_out[done % plan.attn_depth], kinds.qkv, x.out[at.begin + done, at.head, rows])
        done = i - (plan.state_depth - 1)
        if 0 <= done < n_tokens:
            slot = x.write_slot[at.begin + done]
            phases.copy_state(ub.state_out[done % plan.state_depth], kinds.pool, align_k, x.pool[slot, at.head, rows])


@kernel
def tile_rows(t: int, plan: PoolSchedule, dv: int) -> PoolTile:
    """Return V tile t of a head."""
    begin = t * plan.v_step
    end = min(begin + plan.v_step, dv)
    return PoolTile(begin, end, (end - begin + DOT_COLUMNS - 1) // DOT_COLUMNS)


@kernel
def run_head(x: PoolArguments, at: HeadPlace, call: PoolCall, ub: PoolSlices) -> None:
    """The machine of `sched.pool_machine` over a head's V tiles: states come in one tile ahead of the tokens."""
    plan, align_k, kind = call.plan, call.layout.align_k, call.kinds.pool
    states = x.pool[at.read_slot, at.head]
    load_head(x, at, call, ub)
    tile = tile_rows(0, plan, call.dims.dv)
    phases.prefetch_state(states[tile.begin : tile.end], kind, align_k, ub.state_queue)
    for t in range(plan.n_v_tiles):
        tile = tile_rows(t, plan, call.dims.dv)
        phases.take_state(states[tile.begin : tile.end], kind, align_k, tile.n_blocks, ub.state_queue, ub.state)
        if t + 1 < plan.n_v_tiles:
            ahead = tile_rows(t + 1, plan, call.dims.dv)
            phases.prefetch_state(states[ahead.begin : ahead.end], kind, align_k, ub.state_queue)
        run_tokens(x, at, tile, call, ub)


def _run_core(b: int, a: PoolArguments) -> None:
    """All items of core b, one after another, in one arena."""
    call, sequences = a.call, a.sequences
    ub = take_pool_slices(a.arenas[b], call.layout, call.plan, call.dims)
    loaded = -1
    for i in range(a.ptr[b], a.ptr[b + 1]):
        n = a.items[i, 0]
        begin = sequences.start[n]
        end = begin + sequences.length[n]
        if n != loaded:
            load_sequence(a, begin, end, call, ub)
            loaded = n
        run_head(a, HeadPlace(begin, end, a.items[i, 1], a.read_slot[n]), call, ub)


def _argument_types(arith: Arith | None) -> PoolArguments:
    """Return the types of the one signature."""
    q, gate = caller_array(types.uint16, 4), caller_array(types.uint16, 3)
    out, pool = (caller_array(types.uint16, n_axes, readonly=False) for n_axes in (4, 5))
    schedule = PoolSchedule(1, 1, 1, 1, False, False, False)
    scalars = PoolCall(schedule, PoolLayout(*[1] * 14), Dims(*[1] * 6), PoolKinds(*[1] * 5), np.float32(1), arith)
    values = (
        q,
        q,
        q,
        gate,
        q,
        gate,
        SEQUENCES,
        INTEGERS,
        INTEGERS,
        ITEMS,
        INTEGERS,
        numba.typeof(scalars),
        ARENAS,
        out,
        pool,
    )
    return PoolArguments._make(values)


walk_cores = Entry(_run_core, lambda: _argument_types(None))
"""The worker for the default arithmetic."""
walk_cores_optioned = Entry(_run_core, lambda: _argument_types(Arith(False, False)))
"""The worker for saturating arithmetic, as its `arith` says."""
