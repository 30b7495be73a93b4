"""Passes over a state whose rows are key dimensions, S [Dk, n]: every element loaded and stored once a token.

With S' = a S + k delta^T the next token asks for S'^T k and S'^T q, and a pass that updates forms both on its way, so
a run of tokens crosses the state once a token. Columns are independent: each is one chain of multiply-adds with d
ascending, whatever the width of the vector that it sits in; tails and strides change no bit.
"""

from typing import Any, Final

import numpy as np
from numba.core import cgutils
from numpy.typing import NDArray

from cgdr_numba.core.fast.passes import make_passes
from cgdr_numba.core.fast.simd import INDEX, Lanes, instruction_set

F32Array = NDArray[np.float32]

BLOCK_VECTORS: Final = {16: 8, 8: 2, 4: 8}
"""Vectors of columns that a pass keeps in registers, by lanes: two sums and a delta each, and what they meet."""


def _emit(builder: Any, given: dict[str, Any]) -> None:
    """Emit a pass: full blocks of vectors, then single vectors, then single columns."""
    n_lanes = instruction_set().lanes
    begin = cgutils.alloca_once_value(builder, INDEX(0))
    for width, n_vectors in ((n_lanes, BLOCK_VECTORS[n_lanes]), (n_lanes, 1), (1, 1)):
        step = INDEX(width * n_vectors)
        left = builder.sub(given["n_columns"], builder.load(begin))
        with cgutils.for_range(builder, builder.sdiv(left, step)):
            _emit_block(builder, given, builder.load(begin), Lanes(builder, width), n_vectors)
            builder.store(builder.add(builder.load(begin), step), begin)


def _emit_block(builder: Any, given: dict[str, Any], begin: Any, lanes: Lanes, n_vectors: int) -> None:
    """Emit all rows of n_vectors * lanes.n columns from `begin` on; operands given say which halves the pass has."""
    places = [builder.add(begin, INDEX(i * lanes.n)) for i in range(n_vectors)]
    updates, reads = "delta" in given, "m" in given
    decay = lanes.splat(given["decay"]) if updates else None
    # NOTE: fetching the next head's state here, or reading it in the same loop, was measured slower or no faster on
    # Zen 5, in cache and in memory.
    deltas = [lanes.load(given["delta"], place) for place in places] if updates else []
    sums = {name: [lanes.variable() for _ in places] for name in ("m", "p")} if reads else {}
    with cgutils.for_range(builder, given["n_rows"]) as loop:
        # What a reading pass has left in the first-level cache are its last rows.
        d = loop.index if reads else builder.sub(builder.sub(given["n_rows"], INDEX(1)), loop.index)
        source = builder.mul(d, given["stride"])
        row = [lanes.load(given["state"], builder.add(source, place)) for place in places]
        if updates:
            factor, target = lanes.splat_at(given["k"], d), builder.mul(d, given["out_stride"])
            for i, place in enumerate(places):
                row[i] = lanes.multiply_add(factor, deltas[i], builder.fmul(decay, row[i]))
                lanes.store(row[i], given["out"], builder.add(target, place))
        for name, factors in (("m", "k_next"), ("p", "q_next")):
            for i, total in enumerate(sums.get(name, ())):
                factor = lanes.splat_at(given[factors], d)
                builder.store(lanes.multiply_add(factor, row[i], builder.load(total)), total)
    for name, totals in sums.items():
        for total, place in zip(totals, places, strict=True):
            lanes.store(builder.load(total), given[name], place)


def plain_read(state: F32Array, k_next: F32Array, q_next: F32Array, m: F32Array, p: F32Array) -> None:
    """Write m = S^T k_next and p = S^T q_next, by NumPy."""
    for factors, total in ((k_next, m), (q_next, p)):
        total[:] = 0
        for d in range(len(state)):
            total += factors[d] * state[d]


def plain_update(state: F32Array, decay: np.float32, k: F32Array, delta: F32Array, out: F32Array) -> None:
    """Write out = decay S + k delta^T, by NumPy."""
    out[:] = decay * state + k[:, np.newaxis] * delta


passes = make_passes(_emit, plain_read, plain_update)
read, update, update_and_read = passes
