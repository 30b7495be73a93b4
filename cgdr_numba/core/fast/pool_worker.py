"""Order only: bins in parallel, and in a bin its (sequence, key head) items, blocks of tokens, heads, value rows."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.fast.convert import widen_rows
from cgdr_numba.core.fast.pool_step import Pool, PoolRows, PoolTokens, run_rows, take_pool_rows
from cgdr_numba.core.fast.step import load_tokens
from cgdr_numba.core.jit import Entry, call_at, spliced_kernel

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
    dv = x.v.shape[2]
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


def _run_bin(
    b: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    beta: Words,
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: PoolKinds,
    is_direct: bool,
    scale: np.float32,
    tile: int,
    arenas: F32Array,
    out: Words,
    words: Words,
    floats: F32Array,
) -> None:
    """All items [n, 2] (sequence, key head) of bin b, one after another, in one arena.

    Tensors are [T, H, D, w]; words and floats are the pool, which is float32 where it is direct. Sequence n begins
    with the state in slot read_slot[n]; the state after token t goes to slot write_slot[t].
    """
    n_shared = dims.hv // dims.hk
    rows = take_pool_rows(arenas[b], dims.dk, dims.dv, 0 if is_direct else n_shared)
    tokens = PoolTokens(v, g, beta, out, (kinds.qkv, kinds.g, kinds.beta))
    pool = Pool(words, floats, kinds.pool, is_direct, write_slot)
    for i in range(bin_ptr[b], bin_ptr[b + 1]):
        n, key_head = items[i, 0], items[i, 1]
        stop = start[n] + length[n]
        heads = (key_head, key_head * n_shared, (key_head + 1) * n_shared)
        for begin in range(start[n], stop, CHUNK):
            slot = read_slot[n]
            if begin > start[n]:
                slot = write_slot[begin - 1] if is_direct else -1
            at = (begin, min(begin + CHUNK, stop), slot, tile)
            run_block(at, heads, (q, k, dims.dk, scale), tokens, pool, rows)


def _walk(
    address: int,
    n_bins: int,
    q: Words,
    k: Words,
    v: Words,
    g: Words,
    beta: Words,
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    read_slot: NDArray[np.int64],
    write_slot: NDArray[np.int64],
    items: NDArray[np.int64],
    bin_ptr: NDArray[np.int64],
    dims: Dims,
    kinds: PoolKinds,
    is_direct: bool,
    scale: np.float32,
    tile: int,
    arenas: F32Array,
    out: Words,
    words: Words,
    floats: F32Array,
) -> None:
    """Run bins in parallel; what they write is apart."""
    for b in numba.prange(n_bins):
        arguments = (
            q,
            k,
            v,
            g,
            beta,
            start,
            length,
            read_slot,
            write_slot,
            items,
            bin_ptr,
            dims,
            kinds,
            is_direct,
            scale,
            tile,
            arenas,
            out,
            words,
            floats,
        )
        call_at(address, np.int64(b), arguments)


def _argument_types() -> tuple[Any, ...]:
    """Return the types of the one signature: any strides and alignment, read-only for inputs."""

    def any_array(dtype: Any, n_axes: int, readonly: bool = True) -> Any:
        return types.Array(dtype, n_axes, "A", readonly=readonly, aligned=False)

    word, integers = types.uint16, types.Array(types.int64, 1, "C")
    return (
        *(any_array(word, n) for n in (4, 4, 4, 3, 3)),
        *([integers] * 4),
        types.Array(types.int64, 2, "C"),
        integers,
        *(numba.typeof(example) for example in (Dims(*[1] * 6), PoolKinds(*[1] * 4))),
        types.boolean,
        types.float32,
        types.int64,
        types.Array(types.float32, 2, "C"),
        any_array(word, 4, readonly=False),
        any_array(word, 5, readonly=False),
        any_array(types.float32, 4, readonly=False),
    )


walk_pool = Entry(_run_bin, _walk, _argument_types)
"""The compiled worker."""
