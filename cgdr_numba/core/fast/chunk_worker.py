"""Order only: bins in parallel, and in a bin its (sequence, key head, V tile) items, chunks, value heads."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.fast.blocks import _emit_fetch, _emit_fetch_for_writing
from cgdr_numba.core.fast.chunk_arena import C, ChunkRows, take_chunk_rows
from cgdr_numba.core.fast.decay import decay_scores, load_gates
from cgdr_numba.core.fast.phases_k import compute_raw_scores, load_pair
from cgdr_numba.core.fast.phases_v import load_state, run_head, store_state
from cgdr_numba.core.fast.step import Tokens, load_tokens, run_tokens
from cgdr_numba.core.fast.step_worker import StepFlags, StepKinds, StepOperands, run_item
from cgdr_numba.core.jit import Entry, kernel
from cgdr_numba.core.ragged import Sequences

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

import os
PF_QK="q" in os.environ.get("PF","")
PF_V="v" in os.environ.get("PF","")
PF_O="o" in os.environ.get("PF","")
FEW = 4
"""Tokens up to which a chunk, the last one of a sequence, goes through the token loop."""
SHORT = 8
"""Tokens up to which a sequence goes through the token loop, over the caller's own arrays."""


class ChunkOperands(NamedTuple):
    """Global memory of a call beside what a step takes."""

    step: StepOperands
    """The operands of the token loop; final_state is empty where final states are not float32."""
    final_words: Words
    """[N, Hv, D1, D2, w], D1 and D2 as in the initial states."""


@kernel
def run_chunk(at: Any, x: ChunkOperands, call: Any, rows: ChunkRows) -> None:
    """One chunk of all value heads of a key head, columns c0 to c1; `at` is (batch row, begin, end, key head, c0, c1).

    Few tokens, and heads whose numbers leave float32 or what differences of gates hold, take the token loop.
    """
    dims, kinds, flags, scale = call[:4]
    row, begin, end, key_head, c0, c1 = at
    s, how, n_shared, n = x.step, (flags.normalise, scale), dims.hv // dims.hk, end - begin
    q, k = s.q[row, begin:end, key_head], s.k[row, begin:end, key_head]
    if n > FEW:
        load_pair(q, k, kinds.qkv, how, rows)
        compute_raw_scores(n, dims.dk, rows)
        if PF_QK and end + C <= s.q.shape[1]:
            _emit_fetch(s.q[row, end:end+C, key_head])
            _emit_fetch(s.k[row, end:end+C, key_head])
    for i in range(n_shared):
        head, state = key_head * n_shared + i, rows.states[i]
        v, out = s.v[row, begin:end, head, c0:c1], s.out[row, begin:end, head, c0:c1]
        g, beta = s.g[row, begin:end, head], s.beta[row, begin:end, head]
        done = False
        if PF_O: _emit_fetch_for_writing(out)
        if PF_V:
            if i + 1 < n_shared:
                _emit_fetch(s.v[row, begin:end, head+1, c0:c1])
            elif end + C <= s.q.shape[1]:
                _emit_fetch(s.v[row, end:end+C, key_head*n_shared, c0:c1])
        if n > FEW and load_gates(g, beta, (kinds.g, kinds.beta), rows.gates):
            decay_scores(rows.raw[:n], rows.raw[n : 2 * n], rows.gates, rows.b, rows.m)
            done = run_head(v, out, kinds.qkv, state, dims.dk, rows)
        if not done:
            load_tokens(q, k, kinds.qkv, how, rows.step)
            tile = state[: dims.dk, : c1 - c0]
            run_tokens(Tokens(v, g, beta, out, (kinds.qkv, kinds.g, kinds.beta)), tile, tile, False, rows.step)


@kernel
def run_chunk_item(item: Any, tokens: Any, x: ChunkOperands, call: Any, arena: F32Array) -> None:
    """All chunks of one (sequence, key head, V tile); `call` is (dims, kinds, flags, scale, tile width, final kind)."""
    dims, kinds, flags, scale, width, final_kind = call
    n, key_head, tile = item
    row, start, length = tokens
    n_shared = dims.hv // dims.hk
    rows = take_chunk_rows(arena, (dims.dk, dims.dv), width, n_shared)
    if length <= SHORT and x.step.final_state.shape[0] > 0:
        if tile == 0:
            run_item(n, key_head, tokens, x.step, (dims, kinds, flags, scale), rows.step)
        return
    c0, c1 = tile * width, min(tile * width + width, dims.dv)
    for i in range(n_shared):
        words = x.step.state_words[n, key_head * n_shared + i]
        load_state(words, kinds.state, flags.is_v_first, (c0, c1), rows.states[i], rows.turn)
    for begin in range(start, start + length, C):
        at = (row, begin, min(begin + C, start + length), key_head, c0, c1)
        run_chunk(at, x, (dims, kinds, flags, scale), rows)
    for i in range(n_shared):
        words = x.final_words[n, key_head * n_shared + i]
        store_state(rows.states[i], final_kind, flags.is_v_first, (c0, c1), words, rows.turn)


@kernel
def run_chunk_bin(b: int, work: Any, sequences: Sequences, x: ChunkOperands, call: Any, arena: F32Array) -> None:
    """All items of bin b, one after another, in one arena."""
    items, bin_ptr = work
    for i in range(bin_ptr[b], bin_ptr[b + 1]):
        n = items[i, 0]
        tokens = (sequences.row[n], sequences.start[n], sequences.length[n])
        run_chunk_item((n, items[i, 1], items[i, 2]), tokens, x, call, arena)


def _walk_chunks(
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
    width: int,
    final_kind: int,
    arenas: F32Array,
    out: Words,
    final_state: F32Array,
    final_words: Words,
) -> None:
    """Walk every bin's items [n, 3] (sequence, key head, V tile) in an arena of its own; what bins write is apart."""
    if len(bin_ptr) == 2:
        operands = ChunkOperands(StepOperands(q, k, v, g, beta, state_words, state, out, final_state), final_words)
        call = (dims, kinds, flags, scale, width, final_kind)
        run_chunk_bin(0, (items, bin_ptr), Sequences(row, start, length), operands, call, arenas[0])
    else:
        for b in numba.prange(len(bin_ptr) - 1):
            operands = ChunkOperands(StepOperands(q, k, v, g, beta, state_words, state, out, final_state), final_words)
            call = (dims, kinds, flags, scale, width, final_kind)
            run_chunk_bin(b, (items, bin_ptr), Sequences(row, start, length), operands, call, arenas[b])


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
        types.int64,
        types.int64,
        types.Array(single, 2, "C"),
        any_array(word, 5, readonly=False),
        any_array(single, 4, readonly=False),
        any_array(word, 5, readonly=False),
    )


walk_chunks = Entry(_walk_chunks, _argument_types)
"""The compiled worker."""
