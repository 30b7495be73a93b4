"""Order only: bins in parallel, and in a bin its (sequence, key head, part) items, blocks of tokens, heads, V tiles."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, SEQUENCES, Entry, caller_array
from cgdr_numba.core.fast.channel_step import (
    ONE,
    ChannelRows,
    ChannelTokens,
    load_decays,
    run_channels,
    take_channel_rows,
)
from cgdr_numba.core.fast.phases_v import load_state, store_state
from cgdr_numba.core.fast.step import load_tokens
from cgdr_numba.core.jit import spliced_kernel
from cgdr_numba.core.ragged import Sequences

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]


class ChannelKinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    g: int
    gk: int
    gv: int
    beta: int
    state: int
    final_state: int


class ChannelFlags(NamedTuple):
    """What the call asks for, and which gates it has."""

    normalise: bool
    is_v_first: bool
    has_g: bool
    has_gk: bool
    has_gv: bool
    is_direct: bool
    """Whether initial and final states are float32, K first with adjacent row elements, so that passes take them."""


class ChannelCuts(NamedTuple):
    """How value columns are cut."""

    n_together: int
    """Value heads of a part."""
    width: int
    """Columns of a part, a multiple of 16."""
    tile: int
    """Columns that a block of tokens runs over at a time, a multiple of 16."""


class ChannelOperands(NamedTuple):
    """Global memory of a sequence's part: value columns c0 to c1."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    gk: Words
    """[B, T, Hv, Dk, w]"""
    tokens: ChannelTokens
    state: F32Array
    """[Hv, Dk, n]; the sequence's initial states, where states are direct."""
    slots: NDArray[np.int64]
    """[T]; which of the final states is the one after each token."""
    final_state: Words
    """[N, Hv, D1, D2, w]"""
    final_floats: F32Array
    """[N, Hv, Dk, n]; the same, where states are direct."""


@spliced_kernel
def run_tile(at: Any, tile: tuple[int, int], x: ChannelOperands, call: Any, state: F32Array, rows: ChannelRows) -> None:
    """A head's tokens of one block over columns c0 to c1 of the part, left where a run of tokens names the same slot.

    `at` is (batch row, begin, end, head, first token and end of the sequence, column that the part begins with).
    """
    dk, kinds, flags, _ = call
    row, begin, end, head, first, stop, part = at
    c0, c1 = tile
    values = x.tokens
    own = ChannelTokens(
        values.v[:, :, :, c0:c1],
        values.g,
        values.gv[:, :, :, c0:c1],
        values.beta,
        values.out[:, :, :, c0:c1],
        values.kinds,
        values.gates,
    )
    work = state[:dk, c0:c1]
    t = begin
    while t < end:
        after = t + 1
        while after < end and x.slots[after] == x.slots[t]:
            after += 1
        slot, is_left = x.slots[t], after == stop or x.slots[min(after, stop - 1)] != x.slots[t]
        source = x.state[head, :, c0:c1] if flags.is_direct and t == first else work
        target = x.final_floats[slot, head, :, c0:c1] if flags.is_direct and is_left else work
        run_channels(own, (row, t, after - t, head, t - begin), (source, work, target), rows)
        if is_left and not flags.is_direct:
            form = (kinds.final_state, flags.is_v_first)
            store_state(state[:, c0:c1], form, (part + c0, part + c1), x.final_state[slot, head], rows.turn)
        t = after


@spliced_kernel
def run_block(at: Any, heads: Any, x: ChannelOperands, call: Any, tile: int, rows: ChannelRows) -> None:
    """Up to 64 tokens of some value heads of a key head, whose states lie in rows.

    `at` is (batch row, begin, end, first token and end of the sequence, column that the part begins with), `heads` is
    (key head, first value head, end of value heads).
    """
    _, kinds, flags, scale = call
    row, begin, end, first, stop, part = at
    key_head, first_head, end_head = heads
    q, k = x.q[row, begin:end, key_head], x.k[row, begin:end, key_head]
    load_tokens(q, k, kinds.qkv, (flags.normalise, scale), rows)
    columns = x.tokens.v.shape[3]
    for head in range(first_head, end_head):
        if flags.has_gk:
            load_decays(x.gk[row, begin:end, head], kinds.gk, rows)
        for c0 in range(0, columns, tile):
            c1 = min(c0 + tile, columns)
            run_tile(
                (row, begin, end, head, first, stop, part), (c0, c1), x, call, rows.states[head - first_head], rows
            )


class ChannelArguments(NamedTuple):
    """What a call gives."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    v: Words
    """[B, T, Hv, Dv, w]"""
    g: Words
    """[B, T, Hv, w]"""
    gk: Words
    """[B, T, Hv, Dk, w]; like gv, any elements where none are given."""
    gv: Words
    """[B, T, Hv, Dv, w]"""
    beta: Words
    state: Words
    """[slots, Hv, D1, D2, w]; D1 and D2 are Dk, Dv, or Dv, Dk where is_v_first."""
    floats: F32Array
    """The same where states are direct."""
    read_slot: NDArray[np.int64]
    """[N]; the state that a sequence begins with."""
    write_slot: NDArray[np.int64]
    """[B, T]; where the state after a token goes, unless the next token's is the same."""
    sequences: Sequences
    items: NDArray[np.int64]
    """[n, 3]; (sequence, key head, part). A part is a V tile of `width` columns of n_together of the key head's value
    heads; V tiles go fastest."""
    bin_ptr: NDArray[np.int64]
    """[bins + 1]"""
    dims: Dims
    kinds: ChannelKinds
    flags: ChannelFlags
    cuts: ChannelCuts
    scale: np.float32
    arenas: F32Array
    """[bins, floats]"""
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: Words
    """[slots, Hv, D1, D2, w]"""
    final_floats: F32Array
    """The same where states are direct."""


def _run_bin(b: int, a: ChannelArguments) -> None:
    """All items of bin b, one after another, in one arena."""
    n_together, width, tile = a.cuts
    n_shared, n_tiles = a.dims.hv // a.dims.hk, (a.dims.dv + width - 1) // width
    rows = take_channel_rows(a.arenas[b], a.dims.dk, width, n_together)
    rows.decays[:] = ONE
    call = (a.dims.dk, a.kinds, a.flags, a.scale)
    token_kinds = (a.kinds.qkv, a.kinds.g, a.kinds.gv, a.kinds.beta)
    form = (a.kinds.state, a.flags.is_v_first)
    for i in range(a.bin_ptr[b], a.bin_ptr[b + 1]):
        n, key_head, group, c0 = a.items[i, 0], a.items[i, 1], a.items[i, 2] // n_tiles, a.items[i, 2] % n_tiles * width
        c1, first_head = min(c0 + width, a.dims.dv), key_head * n_shared + group * n_together
        end_head = min(first_head + n_together, (key_head + 1) * n_shared)
        tokens = ChannelTokens(
            a.v[:, :, :, c0:c1],
            a.g,
            a.gv[:, :, :, c0:c1],
            a.beta,
            a.out[:, :, :, c0:c1],
            token_kinds,
            (a.flags.has_g, a.flags.has_gv),
        )
        initial, final = a.floats[a.read_slot[n], :, :, c0:c1], a.final_floats[:, :, :, c0:c1]
        row, start = a.sequences.row[n], a.sequences.start[n]
        operands = ChannelOperands(a.q, a.k, a.gk, tokens, initial, a.write_slot[row], a.final_state, final)
        for head in range(first_head, first_head if a.flags.is_direct else end_head):
            load_state(a.state[a.read_slot[n], head], form, (c0, c1), rows.states[head - first_head], rows.turn)
        stop = start + a.sequences.length[n]
        for begin in range(start, stop, CHUNK):
            at = (row, begin, min(begin + CHUNK, stop), start, stop, c0)
            run_block(at, (key_head, first_head, end_head), operands, call, tile, rows)


def _argument_types() -> ChannelArguments:
    """Return the types of the one signature."""
    dims, kinds = numba.typeof(Dims(*[1] * 6)), numba.typeof(ChannelKinds(*[1] * 7))
    flags, cuts = numba.typeof(ChannelFlags(*[False] * 6)), numba.typeof(ChannelCuts(*[1] * 3))
    q, gate = caller_array(types.uint16, 5), caller_array(types.uint16, 4)
    result = caller_array(types.uint16, 5, readonly=False)
    values = (
        q,
        q,
        q,
        gate,
        q,
        q,
        gate,
        q,
        caller_array(types.float32, 4),
        INTEGERS,
        caller_array(types.int64, 2),
        SEQUENCES,
        ITEMS,
        INTEGERS,
        dims,
        kinds,
        flags,
        cuts,
        types.float32,
        ARENAS,
        result,
        result,
        caller_array(types.float32, 4, readonly=False),
    )
    return ChannelArguments._make(values)


walk_channels = Entry(_run_bin, _argument_types)
"""The compiled worker."""
