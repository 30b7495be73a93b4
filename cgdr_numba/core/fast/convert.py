"""Rows of raw elements to float32 and back, a vector at a time where they lie next to one another.

Integer arithmetic as in `core.dtypes` and with its bits, since conversion instructions are missing from some
processors and flush subnormals on others.
"""

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import BF16, FP16, FP32, narrow, widen
from cgdr_numba.core.fast.simd import FLOAT, INDEX, instruction_set
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_WORD, _BITS = ir.IntType(16), ir.IntType(32)


class Elements:
    """Emits conversions of `n` elements at once; n = 1 is a scalar in a vector."""

    def __init__(self, builder: Any, n: int) -> None:
        self.builder, self.n = builder, n
        self.words, self.bits = ir.VectorType(_WORD, n), ir.VectorType(_BITS, n)
        self.floats = ir.VectorType(FLOAT, n)

    def constant(self, value: int | float, kind: Any) -> Any:
        """`value` in every lane."""
        return ir.Constant(kind, [value] * self.n)

    def shifted(self, value: Any, left: int) -> Any:
        """Every lane shifted left, or right where negative."""
        amount = self.constant(abs(left), self.bits)
        return self.builder.shl(value, amount) if left > 0 else self.builder.lshr(value, amount)

    def masked(self, value: Any, mask: int) -> Any:
        """Every lane and `mask`."""
        return self.builder.and_(value, self.constant(mask, self.bits))

    def below(self, value: Any, limit: int) -> Any:
        """Whether lanes, as unsigned integers, are below `limit`."""
        return self.builder.icmp_unsigned("<", value, self.constant(limit, self.bits))

    def half_to_float(self, words: Any) -> Any:
        """Exact; subnormals through an integer-to-float conversion, with no subnormal float32 on the way."""
        builder = self.builder
        wide = builder.zext(words, self.bits)
        magnitude = self.masked(wide, 0x7FFF)
        moved = self.shifted(magnitude, 13)
        normal = builder.add(moved, self.constant(0x38000000, self.bits))
        special = builder.or_(moved, self.constant(0x7F800000, self.bits))
        tiny = builder.fmul(builder.uitofp(magnitude, self.floats), self.constant(2.0**-24, self.floats))
        value = builder.select(self.below(magnitude, 0x7C00), normal, special)
        value = builder.select(self.below(magnitude, 0x0400), builder.bitcast(tiny, self.bits), value)
        sign = self.shifted(self.masked(wide, 0x8000), 16)
        return builder.bitcast(builder.or_(value, sign), self.floats)

    def bf16_to_float(self, words: Any) -> Any:
        """Exact: the word is the upper half."""
        return self.builder.bitcast(self.shifted(self.builder.zext(words, self.bits), 16), self.floats)

    def float_to_half(self, floats: Any) -> Any:
        """To nearest even; overflow gives infinity."""
        builder = self.builder
        bits = builder.bitcast(floats, self.bits)
        magnitude = self.masked(bits, 0x7FFFFFFF)
        odd = self.masked(self.shifted(magnitude, -13), 1)
        rounded = builder.add(builder.sub(magnitude, self.constant(0x38000000 - 0x0FFF, self.bits)), odd)
        # Subnormal halves count in 2^-24; adding 1.5 * 2^23 to that count rounds it to an integer.
        count = builder.fmul(builder.bitcast(magnitude, self.floats), self.constant(2.0**24, self.floats))
        shifted = builder.bitcast(builder.fadd(count, self.constant(12582912.0, self.floats)), self.bits)
        tiny = builder.sub(shifted, self.constant(0x4B400000, self.bits))
        value = builder.select(self.below(magnitude, 0x38800000), tiny, self.shifted(rounded, -13))
        value = builder.select(self.below(magnitude, 0x477FF000), value, self.constant(0x7C00, self.bits))
        value = builder.select(self.below(magnitude, 0x7F800001), value, self.constant(0x7E00, self.bits))
        sign = self.masked(self.shifted(bits, -16), 0x8000)
        return builder.trunc(builder.or_(value, sign), self.words)

    def float_to_bf16(self, floats: Any) -> Any:
        """To nearest even; NaN stays NaN."""
        builder = self.builder
        bits = builder.bitcast(floats, self.bits)
        odd = self.masked(self.shifted(bits, -16), 1)
        rounded = builder.add(builder.add(bits, self.constant(0x7FFF, self.bits)), odd)
        nan = builder.or_(self.masked(bits, 0x80000000), self.constant(0x7FC00000, self.bits))
        finite = self.below(self.masked(bits, 0x7FFFFFFF), 0x7F800001)
        return builder.trunc(self.shifted(builder.select(finite, rounded, nan), -16), self.words)


def _emit_loop(builder: Any, n: Any, emit: Any) -> None:
    """Emit whole vectors, then single elements: emit(elements, begin)."""
    n_lanes = instruction_set().lanes
    n_vectors = builder.sdiv(n, INDEX(n_lanes))
    tail = builder.mul(n_vectors, INDEX(n_lanes))
    for lanes, start, end in ((n_lanes, INDEX(0), n_vectors), (1, tail, n)):
        with cgutils.for_range(builder, end, start=start) as loop:
            emit(Elements(builder, lanes), builder.mul(loop.index, INDEX(lanes)))


def _rows_intrinsic(to_float: bool) -> Any:
    """Return an intrinsic over (words [m, n, w], kind, floats [m, n]), or over one row without the axis m.

    Elements of a row lie next to one another.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def emitted(_typing_context: Any, words: Any, _kind: Any, floats: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            words_array = context.make_array(signature.args[0])(context, builder, values[0])
            floats_array = context.make_array(signature.args[2])(context, builder, values[2])
            n_rows, n = [INDEX(1), *cgutils.unpack_tuple(builder, words_array.shape)][-3:-1]
            for number, name in ((FP16, "half"), (BF16, "bf16"), (FP32, "")):
                is_kind = builder.icmp_signed("==", values[1], ir.Constant(values[1].type, number))
                with builder.if_then(is_kind), cgutils.for_range(builder, n_rows) as loop:
                    rows = [row_of(builder, array, loop.index) for array in (words_array, floats_array)]
                    _emit_loop(builder, n, _move(to_float, name, *rows))
            return context.get_dummy_value()

        return types.void(words, types.intp, floats), generate

    return emitted


def row_of(builder: Any, array: Any, row: Any) -> Any:
    """Return the address of the first element of a row."""
    offset = builder.mul(row, builder.extract_value(array.strides, 0))
    address = builder.gep(builder.bitcast(array.data, ir.IntType(8).as_pointer()), [offset])
    return builder.bitcast(address, array.data.type)


def _move(to_float: bool, name: str, words: Any, floats: Any) -> Any:
    """Return what emits one step of a row: load, convert, store."""

    def emit(elements: Elements, begin: Any) -> None:
        builder = elements.builder
        element = elements.words if name else elements.floats
        raw = builder.bitcast(words, element.element.as_pointer())
        raw_place = builder.bitcast(builder.gep(raw, [begin]), element.as_pointer())
        float_place = builder.bitcast(builder.gep(floats, [begin]), elements.floats.as_pointer())
        source, target = (raw_place, float_place) if to_float else (float_place, raw_place)
        value = builder.load(source)
        value.align = 1 if to_float else 4
        if name:
            convert = f"{name}_to_float" if to_float else f"float_to_{name}"
            value = getattr(elements, convert)(value)
        builder.store(value, target).align = 4 if to_float else 1

    return emit


@intrinsic  # type: ignore[untyped-decorator]
def _emit_swapped(_typing_context: Any, words: Any) -> Any:
    """The same elements [n, m, w] of [m, n, w]; numba's own transpose of axes counts references."""
    swapped = words.copy(layout="A")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, values[0])
        target = context.make_array(swapped)(context, builder)
        turned = {}
        for name in ("shape", "strides"):
            sizes = cgutils.unpack_tuple(builder, getattr(source, name))
            turned[name] = cgutils.pack_array(builder, [sizes[1], sizes[0], *sizes[2:]])
        for name in ("data", "itemsize", "nitems", "meminfo", "parent"):
            setattr(target, name, getattr(source, name))
        target.shape, target.strides = turned["shape"], turned["strides"]
        return target._getvalue()

    return swapped(words), generate


def plain_swapped(words: Words) -> Words:
    """Elements [n, m, w] of [m, n, w], a view by NumPy."""
    return words.swapaxes(0, 1)


swapped = plain_swapped if numba.config.DISABLE_JIT else _emit_swapped
"""Elements [n, m, w] of [m, n, w], a view."""

_widen_vectors, _narrow_vectors = _rows_intrinsic(True), _rows_intrinsic(False)
_WIDE_ENOUGH: Final = not numba.config.DISABLE_JIT


@kernel
def adjacent(kind: int, stride: int, word_stride: int, n_words: int) -> bool:
    """Return whether elements of n_words words lie next to one another in a format that vectors take."""
    # The axis of a single word has any stride.
    return kind <= FP32 and stride == 2 * n_words and (n_words == 1 or word_stride == 2)


@kernel
def widen_row(words: Words, kind: int, y: F32Array) -> None:
    """y[:n] = elements [n, w] as float32; exact but for float64, which is rounded to nearest even."""
    if _WIDE_ENOUGH and adjacent(kind, words.strides[0], words.strides[1], words.shape[1]):
        _widen_vectors(words, kind, y)
    else:
        for i in range(words.shape[0]):
            y[i] = widen(words[i], kind)


@kernel
def narrow_row(x: F32Array, kind: int, words: Words) -> None:
    """Elements [n, w] = x[:n], rounded to nearest even."""
    if _WIDE_ENOUGH and adjacent(kind, words.strides[0], words.strides[1], words.shape[1]):
        _narrow_vectors(words, kind, x)
    else:
        for i in range(words.shape[0]):
            narrow(x[i], kind, words[i])


@kernel
def widen_rows(words: Words, kind: int, y: F32Array) -> None:
    """y[:m, :n] = elements [m, n, w], each row as `widen_row` has it."""
    if _WIDE_ENOUGH and adjacent(kind, words.strides[1], words.strides[2], words.shape[2]):
        _widen_vectors(words, kind, y)
    else:
        for i in range(words.shape[0]):
            for j in range(words.shape[1]):
                y[i, j] = widen(words[i, j], kind)


@kernel
def narrow_rows(x: F32Array, kind: int, words: Words) -> None:
    """Elements [m, n, w] = x[:m, :n], rounded to nearest even."""
    if _WIDE_ENOUGH and adjacent(kind, words.strides[1], words.strides[2], words.shape[2]):
        _narrow_vectors(words, kind, x)
    else:
        for i in range(words.shape[0]):
            for j in range(words.shape[1]):
                narrow(x[i, j], kind, words[i, j])
