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
from cgdr_numba.core.fast.simd import INDEX, SMALL, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

GROUP: Final = 8
"""Rows of outputs that are summed side by side: enough chains to hide the latency of a multiply-add."""


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


class _Column:
    """Emits one vector of columns."""

    def __init__(self, builder: Any, lanes: Lanes, arrays: Triangle, begin: Any) -> None:
        self.builder, self.lanes, self.arrays, self.begin = builder, lanes, arrays, begin
        self.n_tokens, self.n_columns = cgutils.unpack_tuple(builder, arrays.u.shape)

    def address(self, array: Any, row: Any) -> Any:
        """The address of a row's first float."""
        stride = self.builder.extract_value(array.strides, 0)
        bytes_ = self.builder.bitcast(array.data, ir.IntType(8).as_pointer())
        return self.builder.bitcast(self.builder.gep(bytes_, [self.builder.mul(row, stride)]), array.data.type)

    def of_row(self, array: Any, row: Any) -> Any:
        """The vector of these columns in a row."""
        return self.lanes.load(self.address(array, row), self.begin)

    def factor(self, array: Any, i: int) -> Any:
        """Element i of a contiguous array in every lane."""
        return self.lanes.splat_at(array.data, INDEX(i))

    def solve(self) -> list[Any]:
        """U of all C rows."""
        x, lanes, builder = self.arrays, self.lanes, self.builder
        u = []
        for i in range(C):
            written = builder.fmul(self.factor(x.beta, i), self.of_row(x.u, INDEX(i)))
            known = builder.fmul(self.factor(x.pull, i), self.of_row(x.through, INDEX(i)))
            u.append(builder.fsub(written, known))
        for j in range(C):
            for i in range(j + 1, C):
                u[i] = lanes.multiply_add(self.factor(x.b, i * C + j), u[j], u[i])
        return u

    def outputs(self, u: list[Any]) -> list[Any]:
        """O of all C rows."""
        x, lanes, builder = self.arrays, self.lanes, self.builder
        o = [
            builder.fmul(self.factor(x.decay, i), self.of_row(x.through, builder.add(self.n_tokens, INDEX(i))))
            for i in range(C)
        ]
        for first in range(0, C, GROUP):
            for j in range(first + GROUP):
                for i in range(max(first, j), first + GROUP):
                    o[i] = lanes.multiply_add(self.factor(x.m, i * C + j), u[j], o[i])
        return o

    def sizes(self, values: list[Any]) -> Any:
        """The largest of the values' bits without sign, over rows and columns that mean something."""
        builder, kind = self.builder, ir.VectorType(SMALL, self.lanes.n)
        places = ir.Constant(kind, list(range(self.lanes.n)))
        left = builder.trunc(builder.sub(self.n_columns, self.begin), SMALL)
        undefined = ir.Constant(kind, ir.Undefined)
        limit = builder.shuffle_vector(
            builder.insert_element(undefined, left, SMALL(0)), undefined, ir.Constant(kind, [0] * self.lanes.n)
        )
        is_column = builder.icmp_signed("<", places, limit)
        largest = ir.Constant(kind, [0] * self.lanes.n)
        for i, value in enumerate(values):
            size = builder.and_(builder.bitcast(value, kind), ir.Constant(kind, [0x7FFFFFFF] * self.lanes.n))
            is_row = builder.icmp_signed("<", INDEX(i), self.n_tokens)
            larger = builder.select(builder.icmp_unsigned(">", size, largest), size, largest)
            largest = builder.select(is_row, larger, largest)
        return builder.select(is_column, largest, ir.Constant(kind, [0] * self.lanes.n))

    def store(self, u: list[Any], o: list[Any]) -> None:
        """Put the results where they go."""
        x, builder = self.arrays, self.builder
        for i in range(C):
            self.lanes.store(builder.fmul(self.factor(x.rest, i), u[i]), self.address(x.u, INDEX(i)), self.begin)
            row = builder.add(self.n_tokens, INDEX(i))
            self.lanes.store(o[i], self.address(x.through, row), self.begin)


@intrinsic  # type: ignore[untyped-decorator]
def _emit_solve(_typing_context: Any, triangle: Any) -> Any:
    """All columns of a `Triangle`; returns whether all outputs are finite."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, values[0])
        arrays = Triangle(
            *(context.make_array(kind)(context, builder, x) for kind, x in zip(triangle, parts, strict=True))
        )
        lanes = Lanes(builder, instruction_set().lanes)
        n_columns = builder.extract_value(arrays.u.shape, 1)
        n_vectors = builder.sdiv(builder.add(n_columns, INDEX(lanes.n - 1)), INDEX(lanes.n))
        kind = ir.VectorType(SMALL, lanes.n)
        largest = cgutils.alloca_once_value(builder, ir.Constant(kind, [0] * lanes.n))
        with cgutils.for_range(builder, n_vectors) as loop:
            column = _Column(builder, lanes, arrays, builder.mul(loop.index, INDEX(lanes.n)))
            u = column.solve()
            o = column.outputs(u)
            column.store(u, o)
            sizes, before = column.sizes(o), builder.load(largest)
            builder.store(builder.select(builder.icmp_unsigned(">", sizes, before), sizes, before), largest)
        answer = ir.IntType(1)(1)
        for lane in range(lanes.n):
            size = builder.extract_element(builder.load(largest), SMALL(lane))
            answer = builder.and_(answer, builder.icmp_unsigned("<", size, SMALL(0x7F800000)))
        return answer

    return types.boolean(triangle), generate


@kernel
def _compiled_solve(x: Triangle) -> bool:
    """Fill u and through; the intrinsic behind an ordinary call."""
    return _emit_solve(x)  # type: ignore[no-any-return]


def plain_solve(x: Triangle) -> bool:
    """Fill u and through by NumPy, row by row."""
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
    x.u[:] = x.rest[:n, np.newaxis] * x.u
    return bool(np.isfinite(out).all())


solve = plain_solve if numba.config.DISABLE_JIT else _compiled_solve
"""Fill u with e^(G_last - G) U and the lower half of through with O; returns whether O, and so U, is finite."""
