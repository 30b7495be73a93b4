"""Passes over a state whose rows are value columns, S [n, Dk]: every element loaded and stored once a token.

The same three passes as `k_first` has. A row's sums run over its vectors with d ascending in every lane, the lanes are
added by halves, and what is left behind the last full vector follows in order: the bits depend on Dk and the vectors'
width alone.
"""

from typing import Any, Final

import numpy as np
from numba.core import cgutils
from numpy.typing import NDArray

from cgdr_numba.core.fast.passes import make_passes
from cgdr_numba.core.fast.simd import INDEX, Lanes, instruction_set

F32Array = NDArray[np.float32]

BLOCK_ROWS: Final = 4
"""Rows at a time: as many independent sums, which share the loads of k and q."""


def _emit(builder: Any, given: dict[str, Any]) -> None:
    """Emit a pass: blocks of rows, then single rows."""
    begin = cgutils.alloca_once_value(builder, INDEX(0))
    for n_rows in (BLOCK_ROWS, 1):
        left = builder.sub(given["n_rows"], builder.load(begin))
        with cgutils.for_range(builder, builder.sdiv(left, INDEX(n_rows))):
            rows = [builder.add(builder.load(begin), INDEX(i)) for i in range(n_rows)]
            _emit_block(builder, given, rows)
            builder.store(builder.add(builder.load(begin), INDEX(n_rows)), begin)


def _emit_block(builder: Any, given: dict[str, Any], rows: list[Any]) -> None:
    """Emit all of Dk of the given rows; the pass has the halves whose operands are given."""
    wide, single = Lanes(builder, instruction_set().lanes), Lanes(builder, 1)
    n_vectors = builder.sdiv(given["n_columns"], INDEX(wide.n))
    tail = builder.mul(n_vectors, INDEX(wide.n))
    totals: dict[str, list[Any]] = {}
    for lanes, start, end in ((wide, INDEX(0), n_vectors), (single, tail, given["n_columns"])):
        sums = {name: [lanes.variable() for _ in rows] for name in ["m", "p"] if name in given}
        with cgutils.for_range(builder, end, start=start) as loop:
            _emit_vectors(builder, given, rows, builder.mul(loop.index, INDEX(lanes.n)), (lanes, sums))
        for name, parts in sums.items():
            added = [lanes.sum(builder.load(part)) for part in parts]
            before = totals.get(name)
            totals[name] = added if before is None else [*map(builder.fadd, before, added)]
    for name, values in totals.items():
        for row, value in zip(rows, values, strict=True):
            builder.store(value, builder.gep(given[name], [row]))


def _emit_vectors(builder: Any, given: dict[str, Any], rows: list[Any], place: Any, target: Any) -> None:
    """Emit one vector of every row, from column `place` on."""
    lanes, sums = target
    shared = {name: lanes.load(given[name], place) for name in ["k", "k_next", "q_next"] if name in given}
    decay = lanes.splat(given["decay"]) if "delta" in given else None
    for i, row in enumerate(rows):
        value = lanes.load(given["state"], builder.add(builder.mul(row, given["stride"]), place))
        if "delta" in given:
            where = builder.add(builder.mul(row, given["out_stride"]), place)
            factor = lanes.splat_at(given["delta"], row)
            value = lanes.multiply_add(factor, shared["k"], builder.fmul(decay, value))
            lanes.store(value, given["out"], where)
        for name, totals in sums.items():
            factor = shared["k_next" if name == "m" else "q_next"]
            builder.store(lanes.multiply_add(factor, value, builder.load(totals[i])), totals[i])


def plain_read(state: F32Array, k_next: F32Array, q_next: F32Array, m: F32Array, p: F32Array) -> None:
    """Write m = S k_next and p = S q_next, by NumPy."""
    rows = np.ascontiguousarray(state)
    m[:], p[:] = (rows * k_next).sum(axis=1), (rows * q_next).sum(axis=1)


def plain_update(state: F32Array, decay: np.float32, k: F32Array, delta: F32Array, out: F32Array) -> None:
    """Write out = decay S + delta k^T, by NumPy."""
    out[:] = decay * state + delta[:, np.newaxis] * k


passes = make_passes(_emit, plain_read, plain_update)
read, update, update_and_read = passes
