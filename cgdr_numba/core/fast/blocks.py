"""Blocks of rows on their way into scratch, transposed a register block at a time, and how large their elements are.

Scratch arrays have room for whole vectors: rows and columns of a block up to the next multiple of 16 are read and
written along with it, and mean nothing.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import FP32
from cgdr_numba.core.fast.convert import adjacent, swapped, widen_rows
from cgdr_numba.core.fast.simd import FLOAT, INDEX, SMALL, Lanes, instruction_set, larger
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


def _emit_turned(lanes: Lanes, shape: list[Any], load: Callable[..., Any], store: Callable[..., None]) -> None:
    """Emit the transpose of [m, n] by blocks: load(row, column) and store(vector, row, column) of the transpose."""
    builder, size = lanes.builder, INDEX(lanes.n)
    blocks = [builder.sdiv(builder.add(n, INDEX(lanes.n - 1)), size) for n in shape]
    with cgutils.for_range(builder, blocks[0]) as down, cgutils.for_range(builder, blocks[1]) as across:
        row, column = builder.mul(down.index, size), builder.mul(across.index, size)
        block = [load(builder.add(row, INDEX(i)), column) for i in range(lanes.n)]
        for i, vector in enumerate(_turned(lanes, block)):
            store(vector, builder.add(column, INDEX(i)), row)


@intrinsic  # type: ignore[untyped-decorator]
def _emit_transpose(_typing_context: Any, x: Any, y: Any) -> Any:
    """Y [n, m] = X [m, n]^T by whole blocks of lanes x lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, source_stride, shape = _array(context, builder, signature.args[0], values[0])
        target, target_stride, _ = _array(context, builder, signature.args[1], values[1])
        lanes = Lanes(builder, instruction_set().lanes)

        def load(row: Any, column: Any) -> Any:
            return lanes.load(source, builder.add(builder.mul(row, source_stride), column))

        def store(vector: Any, row: Any, column: Any) -> None:
            lanes.store(vector, target, builder.add(builder.mul(row, target_stride), column))

        _emit_turned(lanes, shape, load, store)
        return context.get_dummy_value()

    return types.void(x, y), generate


@intrinsic  # type: ignore[untyped-decorator]
def _emit_transpose_singles(_typing_context: Any, words: Any, y: Any) -> Any:
    """Y [m, n] = float32 elements [m, n, 2] whose first axis is dense, m and n multiples of the lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        target, target_stride, _ = _array(context, builder, signature.args[1], values[1])
        m, n, _ = cgutils.unpack_tuple(builder, array.shape)
        stride = builder.extract_value(array.strides, 1)
        start = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        lanes = Lanes(builder, instruction_set().lanes)

        def load(row: Any, column: Any) -> Any:
            offset = builder.add(builder.mul(row, stride), builder.mul(column, INDEX(4)))
            value = builder.load(builder.bitcast(builder.gep(start, [offset]), lanes.vector.as_pointer()))
            value.align = 1
            return value

        def store(vector: Any, row: Any, column: Any) -> None:
            lanes.store(vector, target, builder.add(builder.mul(row, target_stride), column))

        _emit_turned(lanes, [n, m], load, store)
        return context.get_dummy_value()

    return types.void(words, y), generate


@intrinsic  # type: ignore[untyped-decorator]
def _emit_largest(_typing_context: Any, x: Any) -> Any:
    """The largest size of an element of X [m, n], by bits without sign: NaN counts as more than infinity."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, stride, (n_rows, n_columns) = _array(context, builder, signature.args[0], values[0])
        wide, single = Lanes(builder, instruction_set().lanes), Lanes(builder, 1)
        n_vectors = builder.sdiv(n_columns, INDEX(wide.n))
        tail = builder.mul(n_vectors, INDEX(wide.n))
        kinds = [ir.VectorType(SMALL, lanes.n) for lanes in (wide, single)]
        places = [cgutils.alloca_once_value(builder, ir.Constant(kind, [0] * kind.count)) for kind in kinds]
        for kind, place in zip(kinds, places, strict=True):
            builder.store(ir.Constant(kind, [0] * kind.count), place)
        parts = (wide, kinds[0], places[0], INDEX(0), n_vectors), (single, kinds[1], places[1], tail, n_columns)
        with cgutils.for_range(builder, n_rows) as loop:
            row = builder.gep(source, [builder.mul(loop.index, stride)])
            for lanes, kind, place, start, end in parts:
                with cgutils.for_range(builder, end, start=start) as columns:
                    value = lanes.load(row, builder.mul(columns.index, INDEX(lanes.n)))
                    mask = ir.Constant(kind, [0x7FFFFFFF] * kind.count)
                    builder.store(
                        larger(builder, builder.and_(builder.bitcast(value, kind), mask), builder.load(place)), place
                    )
        most = SMALL(0)
        for kind, place in zip(kinds, places, strict=True):
            for lane in range(kind.count):
                most = larger(builder, most, builder.extract_element(builder.load(place), SMALL(lane)))
        return builder.bitcast(most, FLOAT)

    return types.float32(x), generate


@kernel
def _compiled_largest(x: F32Array) -> np.float32:
    """The largest size of an element; the intrinsic behind an ordinary call."""
    return _emit_largest(x)  # type: ignore[no-any-return]


@kernel
def _compiled_transpose(x: F32Array, y: F32Array) -> None:
    """Y = X^T; the intrinsic behind an ordinary call."""
    _emit_transpose(x, y)


def plain_largest(x: F32Array) -> np.float32:
    """The largest size of an element, NaN where there is one, by NumPy."""
    return np.float32(np.max(np.abs(x), initial=0.0))


def plain_transpose(x: F32Array, y: F32Array) -> None:
    """Y = X^T by NumPy."""
    y[: x.shape[1], : x.shape[0]] = x.T


_PLAIN = bool(numba.config.DISABLE_JIT)
transpose = plain_transpose if _PLAIN else _compiled_transpose
"""Y [n, m] = X [m, n]^T."""


largest = plain_largest if _PLAIN else _compiled_largest
"""The largest size of an element of X [m, n]; NaN where there is one."""

_swapped = swapped


@kernel
def _transpose_singles(words: Words, y: F32Array) -> None:
    """The intrinsic behind an ordinary call."""
    _emit_transpose_singles(words, y)


@kernel
def load_block(words: Words, kind: int, y: F32Array, turn: F32Array) -> None:
    """y[:m, :n] = elements [m, n, w] as float32, fast where either axis has its elements next to one another.

    `turn` is flat scratch of at least ceil16(n) * ceil16(m) floats, used where that axis is the first one.
    """
    m, n = words.shape[0], words.shape[1]
    if n > 1 and adjacent(kind, words.strides[0], words.strides[2], words.shape[2]):
        # Whole blocks of float32 need no copy; others would read beyond the elements.
        if not _PLAIN and kind == FP32 and m % 16 == 0 and n % 16 == 0:
            _transpose_singles(words, y)
            return
        columns = turn[: (m + 15) // 16 * 16 * n].reshape(n, (m + 15) // 16 * 16)
        widen_rows(_swapped(words), kind, columns)
        transpose(columns[:, :m], y)
    else:
        widen_rows(words, kind, y)
