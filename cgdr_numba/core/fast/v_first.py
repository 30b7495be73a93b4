"""A run of tokens over a state whose rows are value columns, S [n, Dk]: every row is on its own.

So a block of rows is taken through all tokens while it lies in the first-level cache, and crosses memory once. A row's
sums run over its vectors with d ascending in every lane, the lanes are added by halves, and what is left behind the
last full vector follows in order: the bits depend on Dk and the vectors' width alone.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.fast.simd import INDEX, SMALL, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

ROWS: Final = {16: 4, 8: 2, 4: 2}
"""Rows of a block by lanes: as many independent sums twice, which share the loads of k and q."""
N_BLOCKS: Final = 2
"""Blocks whose tokens take turns."""
ROWS_AHEAD: Final = 16
"""How far ahead of a block rows are fetched, into the next head's where this one ends."""
USUAL_DK: Final = 128
"""Width of keys that code is made for by itself; any other takes loops of any length, with the same bits."""


class RowTokens(NamedTuple):
    """Operands of a run of L tokens over n rows; elements of a row are adjacent in every array."""

    source: F32Array
    """[n, Dk]; S before the first token."""
    k: F32Array
    """[L, Dk]"""
    q: F32Array
    """[L, Dk]"""
    kq: F32Array
    """[L]; k . q."""
    decay: F32Array
    """[L]; e^g."""
    beta: F32Array
    """[L]"""
    values: F32Array
    """[L, n]; V, over which the outputs S^T q go."""
    state: F32Array
    """[n, Dk]; becomes S after the last token; it may be the source."""


class _Array(NamedTuple):
    """Address of an array's first float, its row stride in floats, its shape."""

    data: Any
    stride: Any
    shape: list[Any]


class _Block:
    """Emits tokens of `n_rows` rows from `begin` on."""

    def __init__(self, builder: Any, x: Any, begin: Any, n_rows: int) -> None:
        self.builder, self.x, self.begin, self.n_rows = builder, x, begin, n_rows
        self.group = Lanes(builder, n_rows)
        self.wide, self.single = Lanes(builder, instruction_set().lanes), Lanes(builder, 1)
        # LLVM would unroll loops of a known length, and hold more vectors than there are registers.
        known = builder.sdiv(x.k.shape[1], INDEX(self.wide.n))
        self.n_vectors = builder.asm(ir.FunctionType(INDEX, [INDEX]), "", "=r,0", [known], side_effect=False)
        self.tail = builder.mul(self.n_vectors, INDEX(self.wide.n))
        self.m, self.p = self.group.variable(), self.group.variable()
        self.rows = self.row_addresses(x.state)

    def row_addresses(self, array: Any) -> list[Any]:
        """The addresses of this block's rows."""
        builder = self.builder
        first = builder.gep(array.data, [builder.mul(self.begin, array.stride)])
        return [builder.gep(first, [builder.mul(array.stride, INDEX(i))]) for i in range(self.n_rows)]

    def start(self) -> None:
        """Bring the rows to where they stay, and take S k and S q of the first token."""
        builder, x = self.builder, self.x
        addresses = (builder.ptrtoint(array.data, INDEX) for array in (x.source, x.state))
        with builder.if_then(builder.icmp_unsigned("!=", *addresses), likely=False):
            sources, n_columns = self.row_addresses(x.source), x.k.shape[1]
            for lanes, start, end in ((self.wide, INDEX(0), self.n_vectors), (self.single, self.tail, n_columns)):
                with cgutils.for_range(builder, end, start=start) as loop:
                    place = builder.mul(loop.index, INDEX(lanes.n))
                    for source, row in zip(sources, self.rows, strict=True):
                        lanes.store(lanes.load(source, place), row, place)
        self.cross(None, INDEX(0))

    def finish(self, token: Any, following: Any) -> None:
        """Put a token's outputs, and update the rows; with another token to follow, take its S k and S q."""
        builder, x, group = self.builder, self.x, self.group
        decay, beta, kq = (group.splat_at(array.data, token) for array in (x.decay, x.beta, x.kq))
        place = builder.add(builder.mul(token, x.values.stride), self.begin)
        left = builder.fmul(decay, builder.load(self.m))
        change = builder.fmul(beta, builder.fsub(group.load(x.values.data, place), left))
        kept = builder.fmul(decay, builder.load(self.p))
        group.store(builder.fadd(kept, builder.fmul(kq, change)), x.values.data, place)
        self.cross((change, token), following)

    def cross(self, update: Any, read: Any) -> None:
        """Emit a pass over all of Dk: S = e^g S + change k^T, and S k and S q of token `read`; either may be None.

        `update` is (change, token).
        """
        builder, n = self.builder, self.n_rows
        sums = self.cross_part(self.wide, (INDEX(0), self.n_vectors), update, read)
        places = self.m, self.p
        if read is not None:
            for place, half in zip(places, _halves(builder, _added(self.wide, sums)), strict=True):
                builder.store(half, place)
        with builder.if_then(builder.icmp_signed("<", self.tail, self.x.k.shape[1])):
            singles = self.cross_part(self.single, (self.tail, self.x.k.shape[1]), update, read)
            for j, place in enumerate(places if read is not None else ()):
                rest = ir.Constant(self.group.vector, ir.Undefined)
                for i, single in enumerate(singles[j * n : (j + 1) * n]):
                    rest = builder.insert_element(rest, builder.extract_element(single, SMALL(0)), SMALL(i))
                builder.store(builder.fadd(builder.load(place), rest), place)

    def cross_part(self, lanes: Lanes, span: Any, update: Any, read: Any) -> list[Any]:
        """Emit the steps `span` of a pass, of one vector each; returns vectors of S k by row, then of S q."""
        builder, x = self.builder, self.x
        sums = [] if read is None else [lanes.variable() for _ in range(2 * self.n_rows)]
        changes, decay = [], None
        if update is not None:
            masks = [ir.Constant(ir.VectorType(SMALL, lanes.n), [i] * lanes.n) for i in range(self.n_rows)]
            undefined = ir.Constant(self.group.vector, ir.Undefined)
            changes = [builder.shuffle_vector(update[0], undefined, mask) for mask in masks]
            decay = lanes.splat_at(x.decay.data, update[1])
        with cgutils.for_range(builder, span[1], start=span[0]) as loop:
            place = builder.mul(loop.index, INDEX(lanes.n))
            factors = [] if read is None else [self.token(lanes, array, read, place) for array in (x.k, x.q)]
            k = None if update is None else self.token(lanes, x.k, update[1], place)
            for i, row in enumerate(self.rows):
                value = lanes.load(row, place)
                if update is None:
                    ahead = builder.add(place, builder.mul(x.state.stride, INDEX(ROWS_AHEAD)))
                    lanes.prefetch_to_write(row, ahead)
                if update is not None:
                    value = lanes.multiply_add(changes[i], k, builder.fmul(decay, value))
                    lanes.store(value, row, place)
                for j, factor in enumerate(factors):
                    total = sums[j * self.n_rows + i]
                    builder.store(lanes.multiply_add(factor, value, builder.load(total)), total)
        return [builder.load(total) for total in sums]

    def token(self, lanes: Lanes, array: Any, token: Any, place: Any) -> Any:
        """A vector of a token's k or q."""
        return lanes.load(array.data, self.builder.add(self.builder.mul(token, array.stride), place))


def _added(lanes: Lanes, vectors: list[Any]) -> Any:
    """The sum by halves of every vector, in one vector: pairs of vectors share the additions of a round."""
    builder, size = lanes.builder, lanes.n

    def halved(a: Any, b: Any, n_lanes: int) -> Any:
        starts = range(0, n_lanes, size)
        masks = [[start + i + offset for start in starts for i in range(size // 2)] for offset in (0, size // 2)]
        kinds = [ir.Constant(ir.VectorType(SMALL, len(mask)), mask) for mask in masks]
        return builder.fadd(*(builder.shuffle_vector(a, b, kind) for kind in kinds))

    while len(vectors) > 1:
        vectors = [halved(a, b, 2 * lanes.n) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        size //= 2
    while size > 1:
        (vector,) = vectors
        vectors = [halved(vector, ir.Constant(vector.type, ir.Undefined), vector.type.count)]
        size //= 2
    return vectors[0]


def _halves(builder: Any, vector: Any) -> list[Any]:
    """The lower and the upper half of a vector."""
    n, undefined = vector.type.count // 2, ir.Constant(vector.type, ir.Undefined)
    masks = [ir.Constant(ir.VectorType(SMALL, n), list(range(start, start + n))) for start in (0, n)]
    return [builder.shuffle_vector(vector, undefined, mask) for mask in masks]


def _emit_blocks(builder: Any, blocks: list[_Block]) -> None:
    """Emit all tokens of some blocks in turns: the sums of one are added while another is crossed."""
    for block in blocks:
        block.start()
    last = builder.sub(blocks[0].x.k.shape[0], INDEX(1))
    with cgutils.for_range(builder, last) as loop:
        for block in blocks:
            block.finish(loop.index, builder.add(loop.index, INDEX(1)))
    for block in blocks:
        block.finish(last, None)


def _emit_rows(builder: Any, x: Any) -> None:
    """Emit all rows: full blocks, then single rows."""
    begin = cgutils.alloca_once_value(builder, INDEX(0))
    for n_blocks, n_rows in ((N_BLOCKS, ROWS[instruction_set().lanes]), (1, 1)):
        left, step = builder.sub(x.state.shape[0], builder.load(begin)), INDEX(n_blocks * n_rows)
        with cgutils.for_range(builder, builder.sdiv(left, step)):
            starts = [builder.add(builder.load(begin), INDEX(i * n_rows)) for i in range(n_blocks)]
            _emit_blocks(builder, [_Block(builder, x, start, n_rows) for start in starts])
            builder.store(builder.add(builder.load(begin), step), begin)


def _with_usual_sizes(x: Any) -> Any:
    """Operands whose Dk and row strides are known while code is made, so that loops over Dk dissolve."""
    size = INDEX(USUAL_DK)
    k, q = (array._replace(stride=size) for array in (x.k, x.q))
    return x._replace(k=k, q=q, state=x.state._replace(stride=size))


@intrinsic  # type: ignore[untyped-decorator]
def _emit_run(_typing_context: Any, operands: Any) -> Any:
    """All rows of `RowTokens`: full blocks, then single rows."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        arrays: list[Any] = []
        for kind, value in zip(operands, values, strict=True):
            array = context.make_array(kind)(context, builder, value)
            stride = builder.sdiv(builder.extract_value(array.strides, 0), INDEX(4))
            arrays.append(_Array(array.data, stride, cgutils.unpack_tuple(builder, array.shape)))
        x: Any = RowTokens(*arrays)
        sizes = (x.k.shape[1], x.k.stride, x.q.stride, x.state.stride)
        is_usual = [builder.icmp_signed("==", size, INDEX(USUAL_DK)) for size in sizes]
        with builder.if_else(functools.reduce(builder.and_, is_usual)) as (usual, other):
            with usual:
                _emit_rows(builder, _with_usual_sizes(x))
            with other:
                _emit_rows(builder, x)
        return context.get_dummy_value()

    return types.void(operands), generate


@kernel
def _compiled_run(x: RowTokens) -> None:
    """Run the tokens; the intrinsic behind an ordinary call."""
    _emit_run(x)


def plain_run(x: RowTokens) -> None:
    """Run the tokens by NumPy."""
    state = x.source.copy()
    for i in range(len(x.k)):
        m, p = (state * x.k[i]).sum(axis=1), (state * x.q[i]).sum(axis=1)
        change = x.beta[i] * (x.values[i] - x.decay[i] * m)
        x.values[i] = x.decay[i] * p + x.kq[i] * change
        state = x.decay[i] * state + change[:, np.newaxis] * x.k[i]
    x.state[:] = state


run_rows = plain_run if numba.config.DISABLE_JIT else _compiled_run
"""S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q for all tokens of `RowTokens`."""
