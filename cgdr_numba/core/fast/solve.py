"""The triangular half of a chunk, a vector of columns at a time in registers: U, the outputs, and what updates take.

R = beta V - (beta e^G) K S;  U = R + B U by forward substitution;  O = e^G Q S + M U.

Element [i, c] of U is R[i, c] + B[i, 0] U[0, c] + B[i, 1] U[1, c] + ... and that of O begins with e^G_i (Q S)[i, c]
and goes on with M[i, 0] U[0, c] + ... + M[i, i] U[i, c]: chains of multiply-adds with j ascending, one rounding each.
Columns are independent, and rows need no inverse, so keys that repeat or nearly do stay exact.
"""

from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.fast.simd import INDEX, SMALL, Lanes, instruction_set, larger
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

GROUP: Final = 8
"""Rows that are summed side by side: enough chains to hide the latency of a multiply-add."""

BLOCK: Final = 16
"""Columns that stay in the chunked form together or leave it: a unit that no V tile cuts, so no plan decides it."""


class Triangle(NamedTuple):
    """Operands of one value head's chunk of n tokens; scratch has room for C rows and whole vectors of columns."""

    b: F32Array
    """[C, C] contiguous; -beta_i D_ij k_i . k_j for j < i."""
    m: F32Array
    """[C, C] contiguous; D_ij q_i . k_j for j <= i."""
    beta: F32Array
    """[C]"""
    pull: F32Array
    """[C]; beta e^G."""
    decay: F32Array
    """[C]; e^G."""
    rest: F32Array
    """[C]; e^(G_last - G)."""
    through: F32Array
    """[2 n, width]; K S, then Q S, over which O goes."""
    u: F32Array
    """[n, width]; V, over which e^(G_last - G) U goes."""
    peaks: F32Array
    """[ceil(width / 16)]; becomes the largest size of U in every 16 columns, NaN where there is one."""


class _Column:
    """Emits one vector of columns: two of them side by side would not leave C rows of U in registers."""

    def __init__(self, builder: Any, lanes: Lanes, arrays: Triangle, begin: Any) -> None:
        self.builder, self.lanes, self.arrays, self.begin = builder, lanes, arrays, begin
        self.n_tokens, self.n_columns = cgutils.unpack_tuple(builder, arrays.u.shape)

    def address(self, array: Any, row: Any) -> Any:
        """The address of a row's first float."""
        stride = self.builder.extract_value(array.strides, 0)
        bytes_ = self.builder.bitcast(array.data, ir.IntType(8).as_pointer())
        return self.builder.bitcast(self.builder.gep(bytes_, [self.builder.mul(row, stride)]), array.data.type)

    def scaled(self, factors: Any, i: int, array: Any, row: Any) -> Any:
        """Element i of `factors` times these columns of a row."""
        return self.builder.fmul(self.factor(factors, i), self.lanes.load(self.address(array, row), self.begin))

    def factor(self, array: Any, i: int) -> Any:
        """Element i of a contiguous array in every lane."""
        return self.lanes.splat_at(array.data, INDEX(i))

    def add(self, matrix: Any, sums: list[Any], first: int, u: Any, j: int) -> list[Any]:
        """Sums of rows from `first` on with token j's part, of U's row u, added."""
        rows = range(first, first + len(sums))
        return [
            self.lanes.multiply_add(self.factor(matrix, i * C + j), u, row) for i, row in zip(rows, sums, strict=True)
        ]

    def solve(self) -> list[Any]:
        """U of all C rows, `GROUP` at a time."""
        x = self.arrays
        u: list[Any] = []
        for first in range(0, C, GROUP):
            rows = []
            for i in range(first, first + GROUP):
                written = self.scaled(x.beta, i, x.u, INDEX(i))
                rows.append(self.builder.fsub(written, self.scaled(x.pull, i, x.through, INDEX(i))))
            for j in range(first):
                rows = self.add(x.b, rows, first, u[j], j)
            for j in range(GROUP):
                u.append(rows[j])
                rows[j + 1 :] = self.add(x.b, rows[j + 1 :], first + j + 1, u[-1], first + j)
        return u

    def outputs(self, u: list[Any]) -> None:
        """Put O of all C rows, `GROUP` at a time."""
        x = self.arrays
        for first in range(0, C, GROUP):
            places = [self.builder.add(self.n_tokens, INDEX(i)) for i in range(first, first + GROUP)]
            rows = [self.scaled(x.decay, i, x.through, place) for i, place in enumerate(places, first)]
            for j in range(first):
                rows = self.add(x.m, rows, first, u[j], j)
            for j in range(GROUP):
                rows[j:] = self.add(x.m, rows[j:], first + j, u[first + j], first + j)
            for row, place in zip(rows, places, strict=True):
                self.lanes.store(row, self.address(x.through, place), self.begin)

    def store_rest(self, u: list[Any]) -> Any:
        """Put e^(G_last - G) U; returns the largest of U's bits without sign, lane by lane."""
        x = self.arrays
        largest = ir.Constant(ir.VectorType(SMALL, self.lanes.n), [0] * self.lanes.n)
        for i, value in enumerate(u):
            largest = self.larger(largest, value, i)
            rest = self.builder.fmul(self.factor(x.rest, i), value)
            self.lanes.store(rest, self.address(x.u, INDEX(i)), self.begin)
        return largest

    def larger(self, largest: Any, value: Any, i: int) -> Any:
        """The larger of `largest` and the bits without sign of row i, where row and columns mean something."""
        builder, kind = self.builder, largest.type
        size = builder.and_(builder.bitcast(value, kind), ir.Constant(kind, [0x7FFFFFFF] * kind.count))
        left = builder.trunc(builder.sub(self.n_columns, self.begin), SMALL)
        undefined = ir.Constant(kind, ir.Undefined)
        single = builder.insert_element(undefined, left, SMALL(0))
        limit = builder.shuffle_vector(single, undefined, ir.Constant(kind, [0] * kind.count))
        is_column = builder.icmp_signed("<", ir.Constant(kind, list(range(kind.count))), limit)
        size = builder.select(is_column, size, ir.Constant(kind, [0] * kind.count))
        is_row = builder.icmp_signed("<", INDEX(i), self.n_tokens)
        return builder.select(is_row, larger(builder, size, largest), largest)


@intrinsic  # type: ignore[untyped-decorator]
def _emit_solve(_typing_context: Any, triangle: Any) -> Any:
    """All columns of a `Triangle`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, values[0])
        arrays = Triangle(
            *(context.make_array(kind)(context, builder, x) for kind, x in zip(triangle, parts, strict=True))
        )
        lanes = Lanes(builder, instruction_set().lanes)
        n_columns = builder.extract_value(arrays.u.shape, 1)
        n_vectors = builder.sdiv(builder.add(n_columns, INDEX(lanes.n - 1)), INDEX(lanes.n))
        peaks = builder.bitcast(arrays.peaks.data, SMALL.as_pointer())
        n_blocks = builder.sdiv(builder.add(n_columns, INDEX(BLOCK - 1)), INDEX(BLOCK))
        with cgutils.for_range(builder, n_blocks) as loop:
            builder.store(SMALL(0), builder.gep(peaks, [loop.index]))
        with cgutils.for_range(builder, n_vectors) as loop:
            begin = builder.mul(loop.index, INDEX(lanes.n))
            column = _Column(builder, lanes, arrays, begin)
            u = column.solve()
            column.outputs(u)
            sizes = column.store_rest(u)
            width = lanes.n
            while width > 1:
                width //= 2
                mask = ir.Constant(sizes.type, [(i + width) % lanes.n for i in range(lanes.n)])
                sizes = larger(builder, sizes, builder.shuffle_vector(sizes, sizes, mask))
            place = builder.gep(peaks, [builder.sdiv(begin, INDEX(BLOCK))])
            builder.store(larger(builder, builder.extract_element(sizes, SMALL(0)), builder.load(place)), place)
        return context.get_dummy_value()

    return types.void(triangle), generate


@kernel
def _compiled_solve(x: Triangle) -> None:
    """Fill u, through and peaks; the intrinsic behind an ordinary call."""
    _emit_solve(x)


def plain_solve(x: Triangle) -> None:
    """Fill u, through and peaks by NumPy, row by row."""
    n = len(x.u)
    memory, out = x.through[:n], x.through[n : 2 * n]
    x.u[:] = x.beta[:n, np.newaxis] * x.u - x.pull[:n, np.newaxis] * memory
    out *= x.decay[:n, np.newaxis]
    for i in range(n):
        for j in range(i):
            x.u[i] += x.b[i, j] * x.u[j]
    for i in range(n):
        for j in range(i + 1):
            out[i] += x.m[i, j] * x.u[j]
    for block in range(-(-out.shape[1] // BLOCK)):
        x.peaks[block] = np.max(np.abs(x.u[:, block * BLOCK : (block + 1) * BLOCK]))
    x.u[:] = x.rest[:n, np.newaxis] * x.u


solve = plain_solve if numba.config.DISABLE_JIT else _compiled_solve
"""Fill u with e^(G_last - G) U, the lower half of through with O, and peaks."""
