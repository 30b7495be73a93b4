"""Rows of results past the caches: lines that are written whole need not be read first, as an ordinary store does.

That saves a third of the memory traffic of results too large for a cache to keep until they are used.
"""

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import BF16, FP16, FP32
from cgdr_numba.core.fast.convert import Elements, adjacent, narrow_rows, row_of
from cgdr_numba.core.fast.simd import INDEX, SMALL
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

LINE_BYTES: Final = 64


@intrinsic  # type: ignore[untyped-decorator]
def _emit_rows(_typing_context: Any, words: Any, _kind: Any, floats: Any) -> Any:
    """(words [m, n, w], kind, floats [m, n]) of adjacent elements: whether rows are whole lines, and were written."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        target = context.make_array(signature.args[0])(context, builder, values[0])
        source = context.make_array(signature.args[2])(context, builder, values[2])
        n_rows, n, n_words = cgutils.unpack_tuple(builder, target.shape)
        row_bytes = builder.mul(builder.mul(n, n_words), INDEX(2))
        together = builder.or_(builder.ptrtoint(target.data, INDEX), builder.extract_value(target.strides, 0))
        odd = builder.and_(builder.or_(together, row_bytes), INDEX(LINE_BYTES - 1))
        is_whole = builder.icmp_unsigned("==", odd, INDEX(0))
        n_lines = builder.sdiv(row_bytes, INDEX(LINE_BYTES))
        with builder.if_then(is_whole):
            for number, name in ((FP16, "half"), (BF16, "bf16"), (FP32, "")):
                is_kind = builder.icmp_signed("==", values[1], ir.Constant(values[1].type, number))
                with builder.if_then(is_kind), cgutils.for_range(builder, n_rows) as loop:
                    rows = [row_of(builder, array, loop.index) for array in (target, source)]
                    with cgutils.for_range(builder, n_lines) as line:
                        _emit_line(builder, name, line.index, *rows)
        return is_whole

    return types.boolean(words, types.intp, floats), generate


def _emit_line(builder: Any, name: str, line: Any, words: Any, floats: Any) -> None:
    """Emit the conversion and the store of one line of a row."""
    elements = Elements(builder, LINE_BYTES // (2 if name else 4))
    place = builder.gep(floats, [builder.mul(line, INDEX(elements.n))])
    value = builder.load(builder.bitcast(place, elements.floats.as_pointer()))
    value.align = 4
    if name:
        value = getattr(elements, f"float_to_{name}")(value)
    first = builder.gep(words, [builder.mul(line, INDEX(LINE_BYTES // 2))])
    store = builder.store(value, builder.bitcast(first, value.type.as_pointer()))
    store.align = LINE_BYTES
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(SMALL, 1)]))


@intrinsic  # type: ignore[untyped-decorator]
def _emit_fence(_typing_context: Any) -> Any:
    """Order what was streamed before whatever follows."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _plain_rows(words: Words, kind: int, x: F32Array) -> bool:
    """Leave rows to ordinary stores."""
    del words, kind, x
    return False


def _plain_fence() -> None:
    """Do nothing."""


_stream_vectors, finish_streams = (_plain_rows, _plain_fence) if numba.config.DISABLE_JIT else (_emit_rows, _emit_fence)


@kernel
def stream_rows(x: F32Array, kind: int, words: Words) -> None:
    """Elements [m, n, w] = x[:m, :n], rounded to nearest even; past the caches where rows are whole lines.

    `finish_streams` comes before anybody else reads them.
    """
    if not (adjacent(kind, words.strides[1], words.strides[2], words.shape[2]) and _stream_vectors(words, kind, x)):
        narrow_rows(x, kind, words)
