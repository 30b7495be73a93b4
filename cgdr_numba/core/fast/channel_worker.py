"""Order only: bins in parallel, and in a bin its (sequence, key head, part) items, blocks of tokens, heads, V tiles."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
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
from cgdr_numba.core.jit import Entry, call_at, spliced_kernel

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


def _run_bin(
    b: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    gk: Words,
    gv: Words,
    beta: Words,
    state: Words,
    floats: F32Array,
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: ChannelKinds,
    flags: ChannelFlags,
    cuts: ChannelCuts,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    final_state: Words,
    final_floats: F32Array,
) -> None:
    """All items [n, 3] (sequence, key head, part) of bin b, one after another, in one arena.

    A part is a V tile of `width` columns of n_together of the key head's value heads; V tiles go fastest. state
    and final_state are [slots, Hv, D1, D2, w], D1 and D2 being Dk, Dv, or Dv, Dk where is_v_first; floats and
    final_floats are the same where states are direct. A sequence begins with the state in its read_slot [N]; the state
    after a token goes to its write_slot [B, T], or the next token's where that is the same. gk and gv are
    [B, T, Hv, D, w]; what is not given has any elements.
    """
    n_together, width, tile = cuts
    n_shared, n_tiles = dims.hv // dims.hk, (dims.dv + width - 1) // width
    rows = take_channel_rows(arenas[b], dims.dk, width, n_together)
    rows.decays[:] = ONE
    call = (dims.dk, kinds, flags, scale)
    token_kinds = (kinds.qkv, kinds.g, kinds.gv, kinds.beta)
    form = (kinds.state, flags.is_v_first)
    for i in range(bin_ptr[b], bin_ptr[b + 1]):
        n, key_head, group, c0 = items[i, 0], items[i, 1], items[i, 2] // n_tiles, items[i, 2] % n_tiles * width
        c1, first_head = min(c0 + width, dims.dv), key_head * n_shared + group * n_together
        end_head = min(first_head + n_together, (key_head + 1) * n_shared)
        tokens = ChannelTokens(
            v[:, :, :, c0:c1],
            g,
            gv[:, :, :, c0:c1],
            beta,
            out[:, :, :, c0:c1],
            token_kinds,
            (flags.has_g, flags.has_gv),
        )
        initial, final = floats[read_slot[n], :, :, c0:c1], final_floats[:, :, :, c0:c1]
        operands = ChannelOperands(q, k, gk, tokens, initial, write_slot[row[n]], final_state, final)
        for head in range(first_head, first_head if flags.is_direct else end_head):
            load_state(state[read_slot[n], head], form, (c0, c1), rows.states[head - first_head], rows.turn)
        stop = start[n] + length[n]
        for begin in range(start[n], stop, CHUNK):
            at = (row[n], begin, min(begin + CHUNK, stop), start[n], stop, c0)
            run_block(at, (key_head, first_head, end_head), operands, call, tile, rows)


def _walk(
    address: int,
    n_bins: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    gk: Words,
    gv: Words,
    beta: Words,
    state: Words,
    floats: F32Array,
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: ChannelKinds,
    flags: ChannelFlags,
    cuts: ChannelCuts,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    final_state: Words,
    final_floats: F32Array,
) -> None:
    """Run bins in parallel; what they write is apart."""
    for b in numba.prange(n_bins):
        arguments = (
            q,
            k,
            v,
            g,
            gk,
            gv,
            beta,
            state,
            floats,
            read_slot,
            write_slot,
            row,
            start,
            length,
            items,
            bin_ptr,
            dims,
            kinds,
            flags,
            cuts,
            scale,
            arenas,
            out,
            final_state,
            final_floats,
        )
        call_at(address, np.int64(b), arguments)


def _argument_types() -> tuple[Any, ...]:
    """Return the types of the one signature: any strides and alignment, read-only for inputs."""

    def any_array(dtype: Any, n_axes: int, readonly: bool = True) -> Any:
        return types.Array(dtype, n_axes, "A", readonly=readonly, aligned=False)

    word, integers = types.uint16, types.Array(types.int64, 1, "C")
    tuples = (Dims(*[1] * 6), ChannelKinds(*[1] * 7), ChannelFlags(*[False] * 6), ChannelCuts(*[1] * 3))
    return (
        *(any_array(word, n) for n in (5, 5, 5, 4, 5, 5, 4, 5)),
        any_array(types.float32, 4),
        integers,
        any_array(types.int64, 2),
        *([integers] * 3),
        types.Array(types.int64, 2, "C"),
        integers,
        *(numba.typeof(example) for example in tuples),
        types.float32,
        types.Array(types.float32, 2, "C"),
        any_array(word, 5, readonly=False),
        any_array(word, 5, readonly=False),
        any_array(types.float32, 4, readonly=False),
    )


walk_channels = Entry(_run_bin, _walk, _argument_types)
"""The compiled worker."""
