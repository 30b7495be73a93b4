"""Order only: cores in parallel, on a core its (sequence, value head) items, their V tiles, the tokens of a tile."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.faithful import pool_phases as phases
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.pool_ub import PoolKinds, PoolSlices, PoolTile, take_pool_slices
from cgdr_numba.core.faithful.ub import F32Array, Words
from cgdr_numba.core.faithful.wide_dot import DOT_COLUMNS
from cgdr_numba.core.jit import Entry, call_at, kernel
from cgdr_numba.core.ragged import value_to_key_head
from cgdr_numba.core.schedule import PoolLayout, PoolSchedule

_value_to_key_head = kernel(value_to_key_head)


class PoolOperands(NamedTuple):
    """Global memory as words: inputs read-only, out and the pool writable."""

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
    out: Words
    """[T, Hv, Dv, w]"""
    pool: Words
    """[slots, Hv, Dv, Dk, w]"""


class PoolCall(NamedTuple):
    """The scalars of a call."""

    plan: PoolSchedule
    layout: PoolLayout
    dims: Dims
    kinds: PoolKinds
    scale: np.float32
    arith: Arith | None


class HeadPlace(NamedTuple):
    """One value head of a sequence: its tokens [begin, end) and the slot that its state comes from."""

    begin: int
    end: int
    head: int
    read_slot: int


@kernel
def load_sequence(x: PoolOperands, begin: int, end: int, call: PoolCall, ub: PoolSlices) -> None:
    """What a core loads at its first head of a sequence, for all heads: beta, e^g and a scalar e^gk."""
    phases.load_head_values(x.beta[begin:end], call.kinds.beta, ub.beta)
    if call.plan.has_g:
        phases.load_decays(x.g[begin:end], call.kinds.g, call.arith, ub.g)
    if call.plan.has_scalar_gk:
        phases.load_decays(x.gk[begin:end, :, 0], call.kinds.gk, call.arith, ub.gk)


@kernel
def load_head(x: PoolOperands, at: HeadPlace, call: PoolCall, ub: PoolSlices) -> None:
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
def run_tokens(
    x: PoolOperands, write_slot: NDArray[np.int64], at: HeadPlace, tile: PoolTile, call: PoolCall, ub: PoolSlices
) -> None:
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
            out_rows, pool_rows = x.out[t, at.head, rows], x.pool[write_slot[t], at.head, rows]
            phases.queue_attn(ub.attn, kinds.qkv, call.arith, ub.attn_out[i % plan.attn_depth], out_rows)
            phases.queue_state(ub.state, kinds.pool, align_k, call.arith, ub.state_out[i % plan.state_depth], pool_rows)
        done = i - (plan.attn_depth - 1)
        if 0 <= done < n_tokens:
            phases.copy_attn(ub.attn_out[done % plan.attn_depth], kinds.qkv, x.out[at.begin + done, at.head, rows])
        done = i - (plan.state_depth - 1)
        if 0 <= done < n_tokens:
            slot = write_slot[at.begin + done]
            phases.copy_state(ub.state_out[done % plan.state_depth], kinds.pool, align_k, x.pool[slot, at.head, rows])


@kernel
def tile_rows(t: int, plan: PoolSchedule, dv: int) -> PoolTile:
    """Return V tile t of a head."""
    begin = t * plan.v_step
    end = min(begin + plan.v_step, dv)
    return PoolTile(begin, end, (end - begin + DOT_COLUMNS - 1) // DOT_COLUMNS)


@kernel
def run_head(x: PoolOperands, write_slot: NDArray[np.int64], at: HeadPlace, call: PoolCall, ub: PoolSlices) -> None:
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
        run_tokens(x, write_slot, at, tile, call, ub)


def _run_core(
    b: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    gk: Words,
    beta: Words,
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    items: NDArray[np.int64],
    ptr: NDArray[np.int64],
    plan: PoolSchedule,
    layout: PoolLayout,
    dims: Dims,
    kinds: PoolKinds,
    arith: Arith | None,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    pool: Words,
) -> None:
    """All items (sequence, value head) of core b, one after another, in one arena."""
    operands = PoolOperands(q, k, v, g, gk, beta, out, pool)
    call = PoolCall(plan, layout, dims, kinds, scale, arith)
    ub = take_pool_slices(arenas[b], layout, plan, dims)
    loaded = -1
    for i in range(ptr[b], ptr[b + 1]):
        n = items[i, 0]
        begin, end = start[n], start[n] + length[n]
        if n != loaded:
            load_sequence(operands, begin, end, call, ub)
            loaded = n
        run_head(operands, write_slot, HeadPlace(begin, end, items[i, 1], read_slot[n]), call, ub)


def _walk(
    address: int,
    n_cores: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    gk: Words,
    beta: Words,
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    items: NDArray[np.int64],
    ptr: NDArray[np.int64],
    plan: PoolSchedule,
    layout: PoolLayout,
    dims: Dims,
    kinds: PoolKinds,
    arith: Arith | None,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    pool: Words,
) -> None:
    """Run cores in parallel; what they write is apart."""
    for b in numba.prange(n_cores):
        arguments = (
            q,
            k,
            v,
            g,
            gk,
            beta,
            start,
            length,
            read_slot,
            write_slot,
            items,
            ptr,
            plan,
            layout,
            dims,
            kinds,
            arith,
            scale,
            arenas,
            out,
            pool,
        )
        call_at(address, np.int64(b), arguments)


def _argument_types(arith: Arith | None) -> tuple[Any, ...]:
    """Return the types of the one signature: words of any strides and alignment, read-only for inputs."""

    def words(n_axes: int, readonly: bool = True) -> Any:
        return types.Array(types.uint16, n_axes, "A", readonly=readonly, aligned=False)

    integers, pairs = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
    schedule = PoolSchedule(1, 1, 1, 1, False, False, False)
    tuples = (schedule, PoolLayout(*[1] * 14), Dims(*[1] * 6), PoolKinds(*[1] * 5), arith)
    return (
        *(words(n) for n in (4, 4, 4, 3, 4, 3)),
        *([integers] * 4),
        pairs,
        integers,
        *(numba.typeof(example) for example in tuples),
        types.float32,
        types.Array(types.float32, 2, "C"),
        words(4, readonly=False),
        words(5, readonly=False),
    )


walk_cores = Entry(_run_core, _walk, lambda: _argument_types(None))
"""The worker for the default arithmetic."""
walk_cores_optioned = Entry(_run_core, _walk, lambda: _argument_types(Arith(False, False)))
"""The worker for saturating arithmetic, as its `arith` says."""
