"""Blocks of rows on their way into scratch: transposed a register block at a time.

Scratch arrays have room for whole vectors: rows and columns of a block up to the next multiple of 16 are read and
written along with it, and mean nothing.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.fast.convert import adjacent, swapped, widen_rows
from cgdr_numba.core.fast.simd import INDEX, SMALL, Lanes, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]


def _array(context: Any, builder: Any, kind: Any, value: Any) -> tuple[Any, Any, list[Any]]:
    """Return the address of an array's first float, its row stride in floats and its shape."""
    array = context.make_array(kind)(context, builder, value)
    stride = builder.sdiv(builder.extract_value(array.strides, 0), INDEX(4))
    return array.data, stride, cgutils.unpack_tuple(builder, array.shape)


def _turned(lanes: Lanes, rows: list[Any]) -> list[Any]:
    """Return the transpose of n vectors of n lanes, by log2(n) rounds in which pairs of rows swap lanes."""
    builder, n, step = lanes.builder, lanes.n, 1
    while step < n:
        low = [lane if not lane & step else n + lane - step for lane in range(n)]
        high = [lane + step if not lane & step else n + lane for lane in range(n)]
        masks = [ir.Constant(ir.VectorType(SMALL, n), mask) for mask in (low, high)]
        for i in range(n):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        step *= 2
    return rows


@intrinsic  # type: ignore[untyped-decorator]
def _emit_transpose(_typing_context: Any, x: Any, y: Any) -> Any:
    """Y [n, m] = X [m, n]^T by whole blocks of lanes x lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, shape = _array(context, builder, signature.args[0], values[0])
        target, target_stride, _ = _array(context, builder, signature.args[1], values[1])
        lanes = Lanes(builder, instruction_set().lanes)
        size = INDEX(lanes.n)
        blocks = [builder.sdiv(builder.add(n, INDEX(lanes.n - 1)), size) for n in shape]
        with cgutils.for_range(builder, blocks[0]) as down, cgutils.for_range(builder, blocks[1]) as across:
            row, column = builder.mul(down.index, size), builder.mul(across.index, size)
            places = [(builder.add(row, INDEX(i)), builder.add(column, INDEX(i))) for i in range(lanes.n)]
            block = [lanes.load(source, builder.add(builder.mul(place, source_stride), column)) for place, _ in places]
            for vector, (_, place) in zip(_turned(lanes, block), places, strict=True):
                lanes.store(vector, target, builder.add(builder.mul(place, target_stride), row))
        return context.get_dummy_value()

    return types.void(x, y), generate


@kernel
def _compiled_transpose(x: F32Array, y: F32Array) -> None:
    """Y = X^T; the intrinsic behind an ordinary call."""
    _emit_transpose(x, y)


def plain_transpose(x: F32Array, y: F32Array) -> None:
    """Y = X^T by NumPy."""
    y[: x.shape[1], : x.shape[0]] = x.T


_PLAIN = bool(numba.config.DISABLE_JIT)
transpose = plain_transpose if _PLAIN else _compiled_transpose
"""Y [n, m] = X [m, n]^T."""


_swapped = swapped


@kernel
def load_block(words: Words, kind: int, y: F32Array, turn: F32Array) -> None:
    """y[:m, :n] = elements [m, n, w] as float32, fast where either axis has its elements next to one another.

    `turn` is flat scratch of at least ceil16(n) * ceil16(m) floats, used where that axis is the first one.
    """
    n_words = words.shape[2]
    if words.shape[1] > 1 and adjacent(kind, words.strides[0], words.strides[2], n_words):
        m, n = words.shape[0], words.shape[1]
        columns = turn[: (m + 15) // 16 * 16 * n].reshape(n, (m + 15) // 16 * 16)
        widen_rows(_swapped(words), kind, columns)
        transpose(columns[:, :m], y)
    else:
        widen_rows(words, kind, y)
