"""Order only: bins in parallel, and in a bin its (sequence, key head, V tile) items, chunks, value heads."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, SEQUENCES, Entry, caller_array
from cgdr_numba.core.fast.blocks import largest
from cgdr_numba.core.fast.chunk_arena import ChunkRows, take_chunk_rows
from cgdr_numba.core.fast.decay import decay_scores, load_gates
from cgdr_numba.core.fast.phases_k import compute_raw_scores, load_pair
from cgdr_numba.core.fast.phases_v import FAR, finish_columns, load_state, run_head, store_state
from cgdr_numba.core.fast.step import Rows, Tokens, load_tokens, run_by_key
from cgdr_numba.core.fast.stream import finish_streams
from cgdr_numba.core.jit import spliced_kernel
from cgdr_numba.core.ragged import Sequences

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

FEW = 12
"""Tokens up to which a chunk, so the last one of a sequence, goes through the token loop."""
WIDEST = np.float32(2.0**10)
"""Size of an element of K or Q up to which a chunk keeps its form; beyond, K K^T might leave float32."""

_largest = largest


class ChunkKinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    g: int
    beta: int
    state: int
    final_state: int


class ChunkOperands(NamedTuple):
    """Global memory of one V tile of n columns."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    v: Words
    """[B, T, Hv, n, w]"""
    g: Words
    """[B, T, Hv, w]"""
    beta: Words
    out: Words
    """[B, T, Hv, n, w]"""


class Call(NamedTuple):
    """The scalars of a call."""

    dims: Dims
    kinds: ChunkKinds
    how: Any
    """(whether q and k are normalised, scale)"""
    is_streamed: bool
    """Whether out goes past the caches."""
    is_v_first: bool


@spliced_kernel
def run_tokens(at: Any, c0: int, c1: int, s: ChunkOperands, own: Any, rows: Rows) -> None:
    """The token loop over columns c0 to c1 of one head's chunk; `own` is (kinds, state [Dk, width])."""
    kinds, state = own
    tokens = Tokens(s.v[:, :, :, c0:c1], s.g, s.beta, s.out[:, :, :, c0:c1], (kinds.qkv, kinds.g, kinds.beta))
    columns = state[:, c0:c1]
    run_by_key(tokens, at, columns, columns, rows)


@spliced_kernel
def run_columns(at: Any, s: ChunkOperands, call: Call, state: F32Array, rows: ChunkRows) -> None:
    """A head's chunk some of whose columns got far: those by the token loop, the others as they are."""
    row, begin, n, head = at
    dk, end, columns = call.dims.dk, begin + n, s.v.shape[3]
    values = (s.v[row, begin:end, head], s.out[row, begin:end, head], call.kinds.qkv)
    for c in range(0, columns, 16):
        if rows.head.peaks[c // 16] <= FAR:
            finish_columns(c, values, state, dk, rows.head)
        else:
            run_tokens(at, c, min(c + 16, columns), s, (call.kinds, state[:dk]), rows.step)


@spliced_kernel
def run_chunk(at: Any, s: ChunkOperands, call: Call, rows: ChunkRows) -> None:
    """One chunk of some value heads of a key head; v and out hold the columns of a V tile.

    `at` is (batch row, begin, end, end of the next chunk, key head, first value head, end of value heads): what comes
    next is fetched meanwhile.
    Few tokens, large keys, heads with large gates, and columns that get far take the token loop.
    """
    dims, kinds, how = call.dims, call.kinds, call.how
    row, begin, end, after, key_head, first_head, end_head = at
    n, x = end - begin, rows.head
    q, k = s.q[row, begin:end, key_head], s.k[row, begin:end, key_head]
    widest = np.float32(np.inf)
    if n > FEW:
        load_pair((q, k), kinds.qkv, how, x.pair, rows.products, x.turn)
        compute_raw_scores(n, dims.dk, x.pair, rows.k_turned, rows.raw)
        widest = _largest(x.pair[: 2 * n, : dims.dk])
    is_chunk = n > FEW and widest <= WIDEST
    for head in range(first_head, end_head):
        state, bounds = rows.states[head - first_head], rows.bounds[head - first_head]
        g, beta = s.g[row, begin:end, head], s.beta[row, begin:end, head]
        has_sums = is_chunk and load_gates(g, beta, (kinds.g, kinds.beta), x.gates)
        done = False
        if has_sums:
            decay_scores(rows.raw[:n], rows.raw[n : 2 * n], x.gates, x.b, x.m)
            values = (s.v[row, begin:end, head], s.out[row, begin:end, head], kinds.qkv, call.is_streamed)
            # The next head's values, and meanwhile the next chunk's keys and queries, with the first head.
            is_last = head + 1 == end_head
            next_v = s.v[row, end:after, first_head] if is_last else s.v[row, begin:end, head + 1]
            until = after if head == first_head else end
            ahead = (s.q[row, end:until, key_head], s.k[row, end:until, key_head], next_v)
            done = run_head(values, ahead, state, (dims.dk, bounds, widest), x)
        if not done:
            load_tokens(q, k, kinds.qkv, how, rows.step)
            at_head = (row, begin, n, head)
            if has_sums:
                run_columns(at_head, s, call, state, rows)
            else:
                run_tokens(at_head, 0, s.v.shape[3], s, (kinds, state[: dims.dk]), rows.step)
            bounds[:] = np.inf


class ChunkArguments(NamedTuple):
    """What a call gives."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    v: Words
    """[B, T, Hv, Dv, w]"""
    g: Words
    """[B, T, Hv, w]"""
    beta: Words
    state: Words
    """[N, Hv, D1, D2, w]; D1 and D2 are Dk, Dv, or Dv, Dk where is_v_first."""
    sequences: Sequences
    items: NDArray[np.int64]
    """[n, 3]; (sequence, key head, part). A part is a V tile of `width` columns of n_together of the key head's value
    heads; V tiles go fastest."""
    bin_ptr: NDArray[np.int64]
    """[bins + 1]"""
    dims: Dims
    kinds: ChunkKinds
    normalise: bool
    is_streamed: bool
    is_v_first: bool
    scale: np.float32
    width: int
    n_together: int
    arenas: F32Array
    """[bins, floats]"""
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: Words
    """[N, Hv, D1, D2, w]"""


def _run_bin(b: int, a: ChunkArguments) -> None:
    """All items of bin b, one after another, in one arena."""
    call = Call(a.dims, a.kinds, (a.normalise, a.scale), a.is_streamed, a.is_v_first)
    n_shared, n_tiles = a.dims.hv // a.dims.hk, (a.dims.dv + a.width - 1) // a.width
    rows = take_chunk_rows(a.arenas[b], (a.dims.dk, a.dims.dv), a.width, a.n_together)
    for i in range(a.bin_ptr[b], a.bin_ptr[b + 1]):
        n, key_head, group, c0 = (
            a.items[i, 0],
            a.items[i, 1],
            a.items[i, 2] // n_tiles,
            a.items[i, 2] % n_tiles * a.width,
        )
        c1, first_head = min(c0 + a.width, a.dims.dv), key_head * n_shared + group * a.n_together
        end_head = min(first_head + a.n_together, (key_head + 1) * n_shared)
        operands = ChunkOperands(a.q, a.k, a.v[:, :, :, c0:c1], a.g, a.beta, a.out[:, :, :, c0:c1])
        form, final_form = (a.kinds.state, a.is_v_first), (a.kinds.final_state, a.is_v_first)
        for head in range(first_head, end_head):
            load_state(a.state[n, head], form, (c0, c1), rows.states[head - first_head], rows.head.turn)
            rows.bounds[head - first_head, :] = np.inf
        row, start = a.sequences.row[n], a.sequences.start[n]
        stop = start + a.sequences.length[n]
        for begin in range(start, stop, C):
            at = (
                row,
                begin,
                min(begin + C, stop),
                min(begin + 2 * C, stop),
                key_head,
                first_head,
                end_head,
            )
            run_chunk(at, operands, call, rows)
        for head in range(first_head, end_head):
            words = a.final_state[n, head]
            store_state(rows.states[head - first_head], final_form, (c0, c1), words, rows.head.turn)
    if a.is_streamed:
        finish_streams()


def _argument_types() -> ChunkArguments:
    """Return the types of the one signature."""
    dims, kinds = numba.typeof(Dims(*[1] * 6)), numba.typeof(ChunkKinds(*[1] * 5))
    q, gate = caller_array(types.uint16, 5), caller_array(types.uint16, 4)
    result = caller_array(types.uint16, 5, readonly=False)
    values = (
        q,
        q,
        q,
        gate,
        gate,
        q,
        SEQUENCES,
        ITEMS,
        INTEGERS,
        dims,
        kinds,
        types.boolean,
        types.boolean,
        types.boolean,
        types.float32,
        types.int64,
        types.int64,
        ARENAS,
        result,
        result,
    )
    return ChunkArguments._make(values)


walk_chunks = Entry(_run_bin, _argument_types)
"""The compiled worker."""
