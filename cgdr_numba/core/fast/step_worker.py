"""Order only: bins in parallel, and in a bin its (sequence, key head) items, blocks of tokens, value heads."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, Entry, caller_array
from cgdr_numba.core.fast.convert import widen_row
from cgdr_numba.core.fast.step import Rows, Tokens, load_tokens, run_by_key, run_by_value, take_rows
from cgdr_numba.core.jit import spliced_kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]


class StepKinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    g: int
    beta: int
    state: int


class StepFlags(NamedTuple):
    """What the call asks for."""

    normalise: bool
    is_v_first: bool
    is_direct: bool
    """Whether the initial state is float32 with adjacent row elements, so that passes read it as it is."""


class StepArguments(NamedTuple):
    """What a call gives; state arrays in the caller's layout, D1 and D2 being Dk, Dv or Dv, Dk."""

    q: Words
    """[B, T, Hk, Dk, w]"""
    k: Words
    v: Words
    """[B, T, Hv, Dv, w]"""
    g: Words
    """[B, T, Hv, w]"""
    beta: Words
    state_words: Words
    """[N, Hv, D1, D2, w]"""
    state: F32Array
    """The same as floats where it is direct."""
    row: NDArray[np.int64]
    """[N]; batch row of each sequence. Unpacking a tuple of arrays would take half a microsecond."""
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    items: NDArray[np.int64]
    """[n, 2]; (sequence, key head)"""
    bin_ptr: NDArray[np.int64]
    dims: Dims
    kinds: StepKinds
    flags: StepFlags
    scale: np.float32
    arenas: F32Array
    """[bins, floats]"""
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: F32Array
    """[N, Hv, D1, D2]"""


@spliced_kernel
def run_item(n: int, key_head: int, place: Any, x: StepArguments, rows: Rows) -> None:
    """All tokens of one (sequence, key head), over the states of the value heads that it serves."""
    dims, kinds, flags, scale = x.dims, x.kinds, x.flags, x.scale
    row, start, length = place
    n_shared = dims.hv // dims.hk
    tokens = Tokens(x.v, x.g, x.beta, x.out, (kinds.qkv, kinds.g, kinds.beta))
    for block in range(0, length, CHUNK):
        begin, end = start + block, start + min(length, block + CHUNK)
        load_tokens(
            x.q[row, begin:end, key_head], x.k[row, begin:end, key_head], kinds.qkv, (flags.normalise, scale), rows
        )
        for head in range(key_head * n_shared, (key_head + 1) * n_shared):
            state = x.final_state[n, head]
            if block == 0 and not flags.is_direct:
                for i in range(state.shape[0]):
                    widen_row(x.state_words[n, head, i], kinds.state, state[i])
            source = x.state[n, head] if block == 0 and flags.is_direct else state
            at = (row, begin, end - begin, head)
            if flags.is_v_first:
                run_by_value(tokens, at, source, state, rows)
            else:
                run_by_key(tokens, at, source, state, rows)


def _run_bin(b: int, x: StepArguments) -> None:
    """All items of bin b, one after another, in one arena."""
    rows = take_rows(x.arenas[b], x.dims.dk, x.dims.dv)
    for i in range(x.bin_ptr[b], x.bin_ptr[b + 1]):
        n = x.items[i, 0]
        run_item(n, x.items[i, 1], (x.row[n], x.start[n], x.length[n]), x, rows)


def _argument_types() -> StepArguments:
    """Return the types of the one signature."""
    dims, kinds, flags = (numba.typeof(x) for x in (Dims(*[1] * 6), StepKinds(*[1] * 4), StepFlags(*[False] * 3)))
    q, gate, states = (caller_array(types.uint16, n_axes) for n_axes in (5, 4, 5))
    values = (
        q,
        q,
        q,
        gate,
        gate,
        states,
        caller_array(types.float32, 4),
        INTEGERS,
        INTEGERS,
        INTEGERS,
        ITEMS,
        INTEGERS,
        dims,
        kinds,
        flags,
        types.float32,
        ARENAS,
        caller_array(types.uint16, 5, readonly=False),
        caller_array(types.float32, 4, readonly=False),
    )
    return StepArguments._make(values)


walk_steps = Entry(
    _run_bin,
    _argument_types,
    moving=("q", "k", "v", "g", "beta", "state", "final_state", "out"),
    is_spliced=False,
)
"""The compiled worker."""
