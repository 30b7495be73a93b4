"""Sixteen DotFp32 side by side: LLVM vector code, and its twin in plain Python.

One dot's tree of 64 products cannot be vectorised by a compiler that must keep its order; sixteen dots with the same
left side can, lane by lane, and every lane keeps the order.
"""

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.jit import kernel

DOT_COLUMNS: Final = 16
"""Dots side by side: one 512-bit vector, or as many smaller ones as the machine has."""
REDUCE_LANES: Final = 64
"""Products that one WholeReduceSum repeat adds up."""

F32Array = NDArray[np.float32]

_FLOAT, _INDEX = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, DOT_COLUMNS)


class _Lanes:
    """Emits vector code for one left side and a block of columns."""

    def __init__(self, builder: Any, a: Any, columns: Any) -> None:
        self.builder, self.a, self.columns = builder, a, columns

    def product(self, d: Any) -> Any:
        """The products a[d] * columns[d, :]."""
        builder = self.builder
        place = builder.gep(self.columns, [builder.mul(d, _INDEX(DOT_COLUMNS))])
        row = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
        row.align = 4
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        single = builder.insert_element(undefined, builder.load(builder.gep(self.a, [d])), ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), DOT_COLUMNS), [0] * DOT_COLUMNS)
        return builder.fmul(builder.shuffle_vector(single, undefined, mask), row)

    def tree(self, begin: Any, width: int) -> Any:
        """The sum of `width` products from `begin` on, by adjacent pairs."""
        if width == 1:
            return self.product(begin)
        half = width // 2
        right = self.builder.add(begin, _INDEX(half))
        return self.builder.fadd(self.tree(begin, half), self.tree(right, half))


@intrinsic  # type: ignore[untyped-decorator]
def _llvm_wide_dot(_typing_context: Any, a: Any, columns: Any, n: Any, sums: Any) -> Any:
    """Write the sums of `wide_dot`; arrays are contiguous."""
    signature = types.void(a, columns, types.intp, sums)
    del n

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args, arguments, strict=True)
            if isinstance(kind, types.Array)
        ]
        lanes, n = _Lanes(builder, *pointers[:2]), arguments[2]
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * DOT_COLUMNS))
        n_repeats = builder.sdiv(n, _INDEX(REDUCE_LANES))
        with cgutils.for_range(builder, n_repeats) as loop:
            group = lanes.tree(builder.mul(loop.index, _INDEX(REDUCE_LANES)), REDUCE_LANES)
            builder.store(builder.fadd(builder.load(total), group), total)
        with cgutils.for_range(builder, n, start=builder.mul(n_repeats, _INDEX(REDUCE_LANES))) as loop:
            builder.store(builder.fadd(builder.load(total), lanes.product(loop.index)), total)
        store = builder.store(builder.load(total), builder.bitcast(pointers[2], _VECTOR.as_pointer()))
        store.align = 4
        return context.get_dummy_value()

    return signature, generate


def plain_wide_dot(a: F32Array, columns: F32Array, n: int, sums: F32Array) -> None:
    """Write the sums of `wide_dot` by NumPy's element-wise operations."""
    products = a[:n, np.newaxis] * columns[: n * DOT_COLUMNS].reshape(n, DOT_COLUMNS)
    tail = n // REDUCE_LANES * REDUCE_LANES
    total = np.zeros(DOT_COLUMNS, np.float32)
    for begin in range(0, tail, REDUCE_LANES):
        group = products[begin : begin + REDUCE_LANES]
        while len(group) > 1:
            group = group[0::2] + group[1::2]
        total = total + group[0]
    for product in products[tail:]:
        total = total + product
    sums[:DOT_COLUMNS] = total


@kernel
def _compiled_wide_dot(a: F32Array, columns: F32Array, n: int, sums: F32Array) -> None:
    """Write the sums of `wide_dot`; the intrinsic behind an ordinary call."""
    _llvm_wide_dot(a, columns, n, sums)


wide_dot = plain_wide_dot if numba.config.DISABLE_JIT else _compiled_wide_dot
"""sums[:16] = DotFp32 of a[:n] with each of 16 columns [n * 16]: groups of 64 by a tree, then groups and tail in order.

Under IEEE overflow only; all arrays contiguous float32.
"""
