"""Order only: bins in parallel, and in a bin its (sequence, key head) items, blocks of tokens, heads, value rows."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.entry import ARENAS, INTEGERS, ITEMS, SEQUENCES, Entry, caller_array
from cgdr_numba.core.fast.convert import widen_rows
from cgdr_numba.core.fast.pool_step import Pool, PoolRows, PoolTokens, run_rows, take_pool_rows
from cgdr_numba.core.fast.step import load_tokens
from cgdr_numba.core.jit import spliced_kernel
from cgdr_numba.core.ragged import Sequences

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]


class PoolKinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    g: int
    beta: int
    pool: int


@spliced_kernel
def run_block(at: Any, heads: Any, keys: Any, x: PoolTokens, pool: Pool, rows: PoolRows) -> None:
    """Up to 64 tokens of a key head, over some rows at a time of the states of its value heads.

    `at` is (begin, end, slot that the states are read from, or -1 where they lie in scratch, rows at a time), `heads`
    is (key head, first value head, end of value heads), `keys` is (q, k, Dk, scale).
    """
    begin, end, read_slot, tile = at
    key_head, first_head, end_head = heads
    q, k, dk, scale = keys
    load_tokens(q[begin:end, key_head], k[begin:end, key_head], x.kinds[0], (False, scale), rows.tokens)
    dv, changes = x.v.shape[2], 0
    for t in range(begin + 1, end):
        changes += 1 if pool.write_slot[t] != pool.write_slot[t - 1] else 0
    if changes == 0:
        # The state goes to memory once, so nothing is won by keeping some rows of it in the cache.
        tile = dv
    for head in range(first_head, end_head):
        for r0 in range(0, dv, tile):
            r1 = min(r0 + tile, dv)
            own = PoolTokens(x.v[:, :, r0:r1], x.g, x.beta, x.out[:, :, r0:r1], x.kinds)
            scratch = rows.states[head - first_head, r0:r1, :dk] if not pool.is_direct else pool.floats[0, head, r0:r1]
            source = scratch
            if read_slot >= 0:
                if pool.is_direct:
                    source = pool.floats[read_slot, head, r0:r1]
                else:
                    widen_rows(pool.words[read_slot, head, r0:r1], pool.kind, scratch)
            run_rows(own, (begin, end - begin, head, r0, r1), (source, scratch), pool, rows.tokens)


class PoolArguments(NamedTuple):
    """What a call gives."""

    q: Words
    """[T, Hk, Dk, w]"""
    k: Words
    v: Words
    """[T, Hv, Dv, w]"""
    g: Words
    """[T, Hv, w]"""
    beta: Words
    sequences: Sequences
    read_slot: NDArray[np.int64]
    """[N]; the state that a sequence begins with."""
    write_slot: NDArray[np.int64]
    """[T]; where the state after a token goes."""
    items: NDArray[np.int64]
    """[n, 2]; (sequence, key head)"""
    bin_ptr: NDArray[np.int64]
    """[bins + 1]"""
    dims: Dims
    kinds: PoolKinds
    is_direct: bool
    scale: np.float32
    tile: int
    arenas: F32Array
    """[bins, floats]"""
    out: Words
    """[T, Hv, Dv, w]"""
    words: Words
    """[slots, Hv, Dv, Dk, w]; the pool."""
    floats: F32Array
    """The same where it is direct, which is float32 with adjacent row elements."""


def _run_bin(b: int, a: PoolArguments) -> None:
    """All items of bin b, one after another, in one arena."""
    n_shared = a.dims.hv // a.dims.hk
    rows = take_pool_rows(a.arenas[b], a.dims.dk, a.dims.dv, 0 if a.is_direct else n_shared)
    tokens = PoolTokens(a.v, a.g, a.beta, a.out, (a.kinds.qkv, a.kinds.g, a.kinds.beta))
    pool = Pool(a.words, a.floats, a.kinds.pool, a.is_direct, a.write_slot)
    for i in range(a.bin_ptr[b], a.bin_ptr[b + 1]):
        n, key_head = a.items[i, 0], a.items[i, 1]
        stop = a.sequences.start[n] + a.sequences.length[n]
        heads = (key_head, key_head * n_shared, (key_head + 1) * n_shared)
        for begin in range(a.sequences.start[n], stop, CHUNK):
            slot = a.read_slot[n]
            if begin > a.sequences.start[n]:
                slot = a.write_slot[begin - 1] if a.is_direct else -1
            at = (begin, min(begin + CHUNK, stop), slot, a.tile)
            run_block(at, heads, (a.q, a.k, a.dims.dk, a.scale), tokens, pool, rows)


def _argument_types() -> PoolArguments:
    """Return the types of the one signature."""
    q, gate = caller_array(types.uint16, 4), caller_array(types.uint16, 3)
    dims, kinds = numba.typeof(Dims(*[1] * 6)), numba.typeof(PoolKinds(*[1] * 4))
    floats = caller_array(types.float32, 4, readonly=False)
    out, words = (caller_array(types.uint16, n_axes, readonly=False) for n_axes in (4, 5))
    values = (
        q,
        q,
        q,
        gate,
        gate,
        SEQUENCES,
        INTEGERS,
        INTEGERS,
        ITEMS,
        INTEGERS,
        dims,
        kinds,
        types.boolean,
        types.float32,
        types.int64,
        ARENAS,
        out,
        words,
        floats,
    )
    return PoolArguments._make(values)


walk_pool = Entry(_run_bin, _argument_types)
"""The compiled worker."""
