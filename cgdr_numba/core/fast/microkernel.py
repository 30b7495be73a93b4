"""One register tile, and small matrix products out of it.

The tile's contract, for every size and tail: C[i, j] = start[i, j] + A[i, 0] B[0, j] + A[i, 1] B[1, j] + ... as one
chain of multiply-adds with k ascending, one rounding each. start is 0, or C, or alpha[i] C[i, j] (rounded once). A may
have any strides, so a transposed A costs nothing. Rows of B and C are contiguous with room for whole vectors: columns
between n and the next multiple of `lanes()` are read from B and written to C, and mean nothing.
"""

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.fast.simd import INDEX, SMALL, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

LINE_BYTES: Final = 64
"""A cache line."""
CHANNELS_A_TILE: Final = 8
"""Rows that are fetched with a tile where they are channels: a chunk's tokens lie in one or two lines of each."""

FROM_ZERO: Final = 0
FROM_C: Final = 1
FROM_SCALED_C: Final = 2
"""What a product starts from."""

TILE: Final = {"avx512": (8, 2), "avx2": (4, 2), "neon": (8, 2), "generic": (4, 2)}
"""Rows and vectors of columns of the register tile; registers hold its sums, a row of B and an element of A."""


def lanes() -> int:
    """Return the floats of a vector: the multiple that rows of B and C have room for."""
    return instruction_set().lanes


class _Ahead:
    """Emits prefetches of rows of elements, one row of each array with every tile.

    All at once they would hold the buffers that the product's own loads need: that was measured to cost what it won.
    """

    def __init__(self, builder: Any, arrays: list[Any]) -> None:
        self.builder, self.count = builder, cgutils.alloca_once_value(builder, INDEX(0))
        builder.store(INDEX(0), self.count)
        self.rows = [self._rows_of(array) for array in arrays]

    def _rows_of(self, array: Any) -> tuple[Any, ...]:
        """(address, stride, rows, lines and bytes of a row, rows a tile) of tokens, or of channels if those are dense.

        A row of tokens may begin inside a line, so its last byte is asked for as well as every 64th. Of a channel the
        last byte is all: what comes before lies in a line that came with an earlier chunk.
        """
        builder = self.builder
        shape, strides = (cgutils.unpack_tuple(builder, x) for x in (array.shape, array.strides))
        element = builder.mul(shape[2], INDEX(2))
        by_token, by_channel = (builder.icmp_signed("==", stride, element) for stride in (strides[1], strides[0]))
        n_rows = builder.select(by_token, shape[0], builder.select(by_channel, shape[1], INDEX(0)))
        last = builder.sub(builder.mul(element, builder.select(by_token, shape[1], shape[0])), INDEX(1))
        first = builder.select(by_token, INDEX(0), last)
        n_lines = builder.add(builder.sdiv(builder.sub(last, first), INDEX(LINE_BYTES)), INDEX(2))
        n_lines = builder.select(by_token, n_lines, INDEX(1))
        stride = builder.select(by_token, strides[0], strides[1])
        place = builder.gep(builder.bitcast(array.data, ir.IntType(8).as_pointer()), [first])
        n_together = builder.select(by_token, INDEX(1), INDEX(CHANNELS_A_TILE))
        return place, stride, n_rows, (n_lines, builder.sub(last, first)), n_together

    def emit(self) -> None:
        """Ask for the next rows of every array that has some, into the first-level cache."""
        builder, step = self.builder, self.builder.load(self.count)
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, SMALL, SMALL, SMALL])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for start, stride, n_rows, (n_lines, last), n_together in self.rows:
            row = builder.mul(step, n_together)
            with (
                builder.if_then(builder.icmp_signed("<", row, n_rows)),
                cgutils.for_range(builder, n_together) as rows,
                cgutils.for_range(builder, n_lines) as lines,
            ):
                first = builder.mul(builder.add(row, rows.index), stride)
                line = builder.mul(lines.index, INDEX(LINE_BYTES))
                offset = builder.add(first, builder.select(builder.icmp_signed("<", line, last), line, last))
                builder.call(ask, [builder.gep(start, [offset]), SMALL(0), SMALL(3), SMALL(1)])
        builder.store(builder.add(step, INDEX(1)), self.count)


class _Tile:
    """Emits tiles of one product."""

    def __init__(self, builder: Any, given: dict[str, Any], start: int) -> None:
        self.builder, self.given, self.start = builder, given, start
        self.ahead = _Ahead(builder, given["ahead"]) if given.get("ahead") else None
        self.lanes = Lanes(builder, instruction_set().lanes)

    def emit(self, row: Any, column: Any, shape: tuple[int, int]) -> None:
        """The tile of `shape` (rows, vectors) whose first element is C[row, column]."""
        builder, given, lanes = self.builder, self.given, self.lanes
        n_rows, n_vectors = shape
        rows = [builder.add(row, INDEX(i)) for i in range(n_rows)]
        columns = [builder.add(column, INDEX(j * lanes.n)) for j in range(n_vectors)]
        a_rows = [builder.gep(given["a"], [builder.mul(i, given["a_row"])]) for i in rows]
        places = [[builder.add(builder.mul(i, given["c_row"]), j) for j in columns] for i in rows]
        sums = [[lanes.variable() for _ in columns] for _ in rows]
        if self.start != FROM_ZERO:
            self._load_start(rows, places, sums)
        with cgutils.for_range(builder, given["depth"]) as loop:
            b_row = builder.mul(loop.index, given["b_row"])
            b = [lanes.load(given["b"], builder.add(b_row, j)) for j in columns]
            a_place = builder.mul(loop.index, given["a_depth"])
            for i in range(n_rows):
                a = lanes.splat_at(a_rows[i], a_place)
                for j in range(n_vectors):
                    total = lanes.multiply_add(a, b[j], builder.load(sums[i][j]))
                    builder.store(total, sums[i][j])
        for i in range(n_rows):
            for j in range(n_vectors):
                lanes.store(builder.load(sums[i][j]), given["c"], places[i][j])

    def _load_start(self, rows: list[Any], places: list[list[Any]], sums: list[list[Any]]) -> None:
        """Begin the sums with C, or with alpha C."""
        builder, given, lanes = self.builder, self.given, self.lanes
        for i, row in enumerate(rows):
            factor = lanes.splat_at(given["alpha"], row) if self.start == FROM_SCALED_C else None
            for place, total in zip(places[i], sums[i], strict=True):
                value = lanes.load(given["c"], place)
                builder.store(value if factor is None else builder.fmul(factor, value), total)


def _emit_product(builder: Any, given: dict[str, Any], start: int) -> None:
    """Emit loops over panels of columns and blocks of rows."""
    tile = _Tile(builder, given, start)
    n_rows, n_vectors = TILE[instruction_set().name]
    n_lanes = tile.lanes.n
    all_vectors = builder.sdiv(builder.add(given["n"], INDEX(n_lanes - 1)), INDEX(n_lanes))
    column = cgutils.alloca_once_value(builder, INDEX(0))
    for vectors in (n_vectors, 1):
        left = builder.sub(all_vectors, builder.load(column))
        with cgutils.for_range(builder, builder.sdiv(left, INDEX(vectors))):
            begin = builder.mul(builder.load(column), INDEX(n_lanes))
            _emit_panel(tile, begin, (n_rows, vectors))
            builder.store(builder.add(builder.load(column), INDEX(vectors)), column)


def _emit_panel(tile: _Tile, column: Any, shape: tuple[int, int]) -> None:
    """Emit all rows of a panel of columns, in blocks of nearly equal height: a single row would not fill the pipes."""
    builder, m = tile.builder, tile.given["m"]
    n_rows, n_vectors = shape
    n_blocks = builder.sdiv(builder.add(m, INDEX(n_rows - 1)), INDEX(n_rows))
    row = cgutils.alloca_once_value(builder, INDEX(0))
    with cgutils.for_range(builder, n_blocks) as loop:
        if tile.ahead is not None:
            tile.ahead.emit()
        first = builder.load(row)
        blocks_left = builder.sub(n_blocks, loop.index)
        rounded_up = builder.add(builder.sub(m, first), builder.sub(blocks_left, INDEX(1)))
        height = builder.sdiv(rounded_up, blocks_left)
        for rows in range(1, n_rows + 1):
            with builder.if_then(builder.icmp_signed("==", height, INDEX(rows))):
                tile.emit(first, column, (rows, n_vectors))
        builder.store(builder.add(first, height), row)


def _product_intrinsic(start: int) -> Any:
    """Return an intrinsic over the tuple (a [m, depth], b [depth, n], c [m, n], alpha [m], *ahead [rows, n, w])."""

    @intrinsic  # type: ignore[untyped-decorator]
    def emitted(_typing_context: Any, operands: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values = cgutils.unpack_tuple(builder, arguments[0])
            a, b, c, alpha, *ahead = (
                context.make_array(kind)(context, builder, value) for kind, value in zip(operands, values, strict=True)
            )

            def stride(array: Any, axis: int) -> Any:
                return builder.sdiv(builder.extract_value(array.strides, axis), INDEX(4))

            given = {"a": a.data, "b": b.data, "c": c.data, "alpha": alpha.data, "ahead": ahead}
            given |= {"a_row": stride(a, 0), "a_depth": stride(a, 1), "b_row": stride(b, 0), "c_row": stride(c, 0)}
            given["m"], given["n"] = cgutils.unpack_tuple(builder, c.shape)
            given["depth"] = builder.extract_value(b.shape, 0)
            _emit_product(builder, given, start)
            return context.get_dummy_value()

        return types.void(operands), generate

    return emitted


_from_zero, _from_c, _from_scaled_c = (_product_intrinsic(start) for start in (FROM_ZERO, FROM_C, FROM_SCALED_C))


@kernel
def _compiled_multiply(a: F32Array, b: F32Array, c: F32Array) -> None:
    """C = A B; the intrinsic behind an ordinary call."""
    _from_zero((a, b, c, c[0]))


@kernel
def _compiled_multiply_ahead(a: F32Array, b: F32Array, c: F32Array, rows: Words) -> None:
    """C = A B; the intrinsic behind an ordinary call."""
    _from_zero((a, b, c, c[0], rows))


@kernel
def _compiled_multiply_onto(a: F32Array, b: F32Array, c: F32Array) -> None:
    """C = C + A B; the intrinsic behind an ordinary call."""
    _from_c((a, b, c, c[0]))


@kernel
def _compiled_multiply_onto_scaled(a: F32Array, b: F32Array, alpha: F32Array, c: F32Array) -> None:
    """C = diag(alpha) C + A B; the intrinsic behind an ordinary call."""
    _from_scaled_c((a, b, c, alpha))


@kernel
def _compiled_multiply_onto_scaled_ahead(
    a: F32Array, b: F32Array, alpha: F32Array, c: F32Array, rows: Words, more_rows: Words
) -> None:
    """C = diag(alpha) C + A B; the intrinsic behind an ordinary call."""
    _from_scaled_c((a, b, c, alpha, rows, more_rows))


def plain_multiply(a: F32Array, b: F32Array, c: F32Array) -> None:
    """C = A B by NumPy, k ascending."""
    c[:] = 0
    plain_multiply_onto(a, b, c)


def plain_multiply_onto(a: F32Array, b: F32Array, c: F32Array) -> None:
    """C = C + A B by NumPy, k ascending."""
    for k in range(len(b)):
        c += a[:, k, np.newaxis] * b[k]


def plain_multiply_onto_scaled(a: F32Array, b: F32Array, alpha: F32Array, c: F32Array) -> None:
    """C = diag(alpha) C + A B by NumPy, k ascending."""
    c *= alpha[:, np.newaxis]
    plain_multiply_onto(a, b, c)


def plain_multiply_ahead(a: F32Array, b: F32Array, c: F32Array, rows: Words) -> None:
    """C = A B by NumPy, k ascending."""
    del rows
    plain_multiply(a, b, c)


def plain_multiply_onto_scaled_ahead(
    a: F32Array, b: F32Array, alpha: F32Array, c: F32Array, rows: Words, more_rows: Words
) -> None:
    """C = diag(alpha) C + A B by NumPy, k ascending."""
    del rows, more_rows
    plain_multiply_onto_scaled(a, b, alpha, c)


_PLAIN = bool(numba.config.DISABLE_JIT)
multiply = plain_multiply if _PLAIN else _compiled_multiply
"""C [m, n] = A [m, depth] B [depth, n]."""
multiply_onto = plain_multiply_onto if _PLAIN else _compiled_multiply_onto
"""C [m, n] = C + A [m, depth] B [depth, n]."""
multiply_onto_scaled = plain_multiply_onto_scaled if _PLAIN else _compiled_multiply_onto_scaled
"""C [m, n] = diag(alpha [m]) C + A [m, depth] B [depth, n]."""
multiply_ahead = plain_multiply_ahead if _PLAIN else _compiled_multiply_ahead
"""`multiply`, which asks for rows of elements [rows, n, w] on its way, for what comes next."""
multiply_onto_scaled_ahead = plain_multiply_onto_scaled_ahead if _PLAIN else _compiled_multiply_onto_scaled_ahead
"""`multiply_onto_scaled`, which asks for two arrays' rows of elements [rows, n, w] on its way."""
