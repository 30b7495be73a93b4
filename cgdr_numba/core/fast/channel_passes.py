"""Passes over a state whose channels forget by themselves: S [Dk, n], rows are key dimensions and decay one by one.

    S <- (diag(a) (b S)) diag(c);   S <- S + k delta^T

b is the decay of the head as a whole, a those of its channels, c those of its columns. Every element is rounded as
these lines say, whatever pass it is in, and a decay of 1 changes no bit. Sums of columns are chains of multiply-adds
with d ascending, as in `k_first`.

A single token looks at what decays would leave, and takes the token in on a second way. Several tokens cross a state
once each where only channels decay: it lies in scratch as it is after its decay, and the pass that takes a token in
decays it for the next.
"""

from typing import Any, Final

import numba
import numpy as np
from numba.core import cgutils
from numpy.typing import NDArray

from cgdr_numba.core.fast.passes import pass_intrinsic
from cgdr_numba.core.fast.simd import INDEX, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

BLOCK_VECTORS: Final = {16: 8, 8: 2, 4: 4}
"""Vectors of columns that a pass keeps in registers, by lanes: whole rows of 128 columns where memory is the limit."""
ADVANCING_VECTORS: Final = {16: 4, 8: 2, 4: 4}
"""The same for the pass that does everything: two sums and a delta each."""


def _emit(builder: Any, given: dict[str, Any]) -> None:
    """Emit a pass: full blocks of vectors, then single vectors, then single columns."""
    n_lanes = instruction_set().lanes
    sizes = BLOCK_VECTORS if "columns" in given else ADVANCING_VECTORS
    begin = cgutils.alloca_once_value(builder, INDEX(0))
    for width, n_vectors in ((n_lanes, sizes[n_lanes]), (n_lanes, 1), (1, 1)):
        step = INDEX(width * n_vectors)
        left = builder.sub(given["n_columns"], builder.load(begin))
        with cgutils.for_range(builder, builder.sdiv(left, step)):
            _Block(builder, given, Lanes(builder, width), n_vectors).emit(builder.load(begin))
            builder.store(builder.add(builder.load(begin), step), begin)


class _Block:
    """Emits all rows of some vectors of columns; the operands given say what the pass does."""

    def __init__(self, builder: Any, given: dict[str, Any], lanes: Lanes, n_vectors: int) -> None:
        self.builder, self.given, self.lanes = builder, given, lanes
        self.n_vectors = n_vectors

    def emit(self, begin: Any) -> None:
        """Emit the block of columns from `begin` on."""
        builder, given, lanes = self.builder, self.given, self.lanes
        places = [builder.add(begin, INDEX(i * lanes.n)) for i in range(self.n_vectors)]
        held: dict[str, list[Any]] = {
            name: [lanes.load(given[name], place) for place in places] for name in ("delta", "columns") if name in given
        }
        sums = {name: [lanes.variable() for _ in places] for name in ("m", "p") if name in given}
        with cgutils.for_range(builder, given["n_rows"]) as loop:
            source = builder.mul(loop.index, given["stride"])
            row = [lanes.load(given["state"], builder.add(source, place)) for place in places]
            row = self._moved(row, loop.index, held)
            if "out" in given:
                target = builder.mul(loop.index, given["out_stride"])
                for value, place in zip(row, places, strict=True):
                    lanes.store(value, given["out"], builder.add(target, place))
            for totals, factors in zip(sums.values(), ("k_next", "q_next"), strict=False):
                factor = lanes.splat_at(given[factors], loop.index)
                for value, total in zip(row, totals, strict=True):
                    builder.store(lanes.multiply_add(factor, value, builder.load(total)), total)
        for name, totals in sums.items():
            for total, place in zip(totals, places, strict=True):
                lanes.store(builder.load(total), given[name], place)

    def _moved(self, row: list[Any], d: Any, held: dict[str, list[Any]]) -> list[Any]:
        """Row d decayed and with its token, or, for the pass that advances, with its token and decayed."""
        builder, given, lanes = self.builder, self.given, self.lanes

        def decayed(row: list[Any]) -> list[Any]:
            if "decay" in given:
                decay = lanes.splat(given["decay"])
                row = [builder.fmul(decay, value) for value in row]
            factor = lanes.splat_at(given["decays"], d)
            row = [builder.fmul(factor, value) for value in row]
            return [*map(builder.fmul, row, held["columns"])] if "columns" in held else row

        def written(row: list[Any]) -> list[Any]:
            if "delta" not in held:
                return row
            factor = lanes.splat_at(given["k"], d)
            return [lanes.multiply_add(factor, delta, value) for delta, value in zip(held["delta"], row, strict=True)]

        return written(decayed(row)) if "columns" in held else decayed(written(row))


def _plain_decayed(state: F32Array, gates: Any) -> F32Array:
    """Return the state decayed, by NumPy."""
    decay, decays, columns = gates
    return ((decay * state) * decays[:, np.newaxis]) * columns  # type: ignore[no-any-return]


def plain_look(state: F32Array, gates: Any, following: Any, m: F32Array, p: F32Array) -> None:
    """Form the sums of a token, by NumPy."""
    plain_decay(state, gates, following, np.empty_like(state), m, p)


def plain_decay(state: F32Array, gates: Any, following: Any, out: F32Array, m: F32Array, p: F32Array) -> None:
    """Decay, and form the sums of a token, row after row, by NumPy."""
    out[:] = _plain_decayed(state, gates)
    for factors, total in zip(following, (m, p), strict=True):
        total[:] = 0
        for d in range(len(out)):
            total += factors[d] * out[d]


def plain_take(state: F32Array, gates: Any, token: Any, out: F32Array) -> None:
    """Decay and take a token in, by NumPy."""
    k, delta = token
    out[:] = k[:, np.newaxis] * delta + _plain_decayed(state, gates)


def plain_advance(state: F32Array, token: Any, decays: F32Array, following: Any, m: F32Array, p: F32Array) -> None:
    """Take a token in, decay for the next, and form its sums, by NumPy."""
    one = np.float32(1)
    plain_take(state, (one, np.ones_like(decays), one), token, state)
    plain_decay(state, (one, decays, one), following, state, m, p)


if numba.config.DISABLE_JIT:
    look, decay, take, advance = plain_look, plain_decay, plain_take, plain_advance
else:
    _GATES, _SUMS = ("decay", "decays", "columns"), ("k_next", "q_next", "m", "p")
    _emit_look = pass_intrinsic(("state", *_GATES, *_SUMS), _emit)
    _emit_decay = pass_intrinsic(("state", *_GATES, "out", *_SUMS), _emit)
    _emit_take = pass_intrinsic(("state", *_GATES, "k", "delta", "out"), _emit)
    _emit_advance = pass_intrinsic(("state", "k", "delta", "decays", "out", *_SUMS), _emit)

    @kernel
    def look(state: F32Array, gates: Any, following: Any, m: F32Array, p: F32Array) -> None:
        """Write m = S^T k and p = S^T q of S decayed by gates (b, a, c), for following (k, q); S stays."""
        _emit_look((state, *gates, *following, m, p))

    @kernel
    def decay(state: F32Array, gates: Any, following: Any, out: F32Array, m: F32Array, p: F32Array) -> None:
        """Write out = S decayed by gates, which may be S, and what `look` writes."""
        _emit_decay((state, *gates, out, *following, m, p))

    @kernel
    def take(state: F32Array, gates: Any, token: Any, out: F32Array) -> None:
        """Write out = S decayed by gates + k delta^T for token (k, delta); out may be S."""
        _emit_take((state, *gates, *token, out))

    @kernel
    def advance(state: F32Array, token: Any, decays: F32Array, following: Any, m: F32Array, p: F32Array) -> None:
        """Take a token into a state that is decayed already, then decay channels and look for the one that follows."""
        _emit_advance((state, *token, decays, state, *following, m, p))
