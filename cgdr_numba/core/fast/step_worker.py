"""Order only: bins in parallel, and in a bin its (sequence, key head) items, blocks of tokens, value heads."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.fast.convert import widen_row
from cgdr_numba.core.fast.step import Rows, Tokens, load_tokens, run_by_key, run_by_value, take_rows
from cgdr_numba.core.jit import Entry, call_at, spliced_kernel

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


class StepOperands(NamedTuple):
    """Global memory of a call; state arrays in the caller's layout, D1 and D2 being Dk, Dv or Dv, Dk."""

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
    out: Words
    """[B, T, Hv, Dv, w]"""
    final_state: F32Array
    """[N, Hv, D1, D2]"""


@spliced_kernel
def run_item(n: int, key_head: int, place: Any, x: StepOperands, call: Any, rows: Rows) -> None:
    """All tokens of one (sequence, key head), over the states of the value heads that it serves."""
    dims, kinds, flags, scale = call
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


def _run_bin(
    b: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    beta: Words,
    state_words: Words,
    state: F32Array,
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: StepKinds,
    flags: StepFlags,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    final_state: F32Array,
) -> None:
    """All items [n, 2] (sequence, key head) of bin b, one after another, in one arena."""
    rows = take_rows(arenas[b], dims.dk, dims.dv)
    operands = StepOperands(q, k, v, g, beta, state_words, state, out, final_state)
    for i in range(bin_ptr[b], bin_ptr[b + 1]):
        n = items[i, 0]
        run_item(n, items[i, 1], (row[n], start[n], length[n]), operands, (dims, kinds, flags, scale), rows)


def _walk(
    address: int,
    n_bins: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    beta: Words,
    state_words: Words,
    state: F32Array,
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: StepKinds,
    flags: StepFlags,
    scale: np.float32,
    arenas: F32Array,
    out: Words,
    final_state: F32Array,
) -> None:
    """Run bins in parallel; what they write is apart."""
    for b in numba.prange(n_bins):
        arguments = (
            q,
            k,
            v,
            g,
            beta,
            state_words,
            state,
            row,
            start,
            length,
            items,
            bin_ptr,
            dims,
            kinds,
            flags,
            scale,
            arenas,
            out,
            final_state,
        )
        call_at(address, np.int64(b), arguments)


def _argument_types() -> tuple[Any, ...]:
    """Return the types of the one signature: any strides and alignment, read-only for inputs."""

    def any_array(dtype: Any, n_axes: int, readonly: bool = True) -> Any:
        return types.Array(dtype, n_axes, "A", readonly=readonly, aligned=False)

    word, single = types.uint16, types.float32
    integers, pairs = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
    tuples = (Dims(*[1] * 6), StepKinds(*[1] * 4), StepFlags(*[False] * 3))
    return (
        *(any_array(word, n) for n in (5, 5, 5, 4, 4, 5)),
        any_array(single, 4),
        *([integers] * 3),
        pairs,
        integers,
        *(numba.typeof(example) for example in tuples),
        types.float32,
        types.Array(single, 2, "C"),
        any_array(word, 5, readonly=False),
        any_array(single, 4, readonly=False),
    )


walk_steps = Entry(_run_bin, _walk, _argument_types)
"""The compiled worker."""
