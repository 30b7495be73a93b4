"""Passes over a state whose rows are key dimensions, made from what emits them or from their plain twins."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.fast.simd import INDEX
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]


class Passes(NamedTuple):
    """Passes over a state S, seen as [Dk, n]."""

    read: Callable[..., None]
    """(state, k, q, m, p): m = S^T k, p = S^T q."""
    update: Callable[..., None]
    """(state, decay, k, delta, out): out = decay S + k delta^T; out may be S."""
    update_and_read: Callable[..., None]
    """(state, decay, k, delta, k_next, q_next, out, m, p): update, then read out; the bits of one after the other."""


def make_passes(
    emit: Callable[[Any, dict[str, Any]], None],
    plain_read: Callable[..., None],
    plain_update: Callable[..., None],
) -> Passes:
    """Return the passes that `emit` makes (see `pass_intrinsic`), or the plain ones where nothing is compiled."""
    if numba.config.DISABLE_JIT:
        return _plain_passes(plain_read, plain_update)
    emit_read = pass_intrinsic(("state", "k_next", "q_next", "m", "p"), emit)
    emit_update = pass_intrinsic(("state", "decay", "k", "delta", "out"), emit)
    emit_both = pass_intrinsic(("state", "decay", "k", "delta", "k_next", "q_next", "out", "m", "p"), emit)

    @kernel
    def read(state: F32Array, k: F32Array, q: F32Array, m: F32Array, p: F32Array) -> None:
        emit_read((state, k, q, m, p))

    @kernel
    def update(state: F32Array, decay: np.float32, k: F32Array, delta: F32Array, out: F32Array) -> None:
        emit_update((state, decay, k, delta, out))

    @kernel
    def update_and_read(
        state: F32Array,
        decay: np.float32,
        k: F32Array,
        delta: F32Array,
        k_next: F32Array,
        q_next: F32Array,
        out: F32Array,
        m: F32Array,
        p: F32Array,
    ) -> None:
        emit_both((state, decay, k, delta, k_next, q_next, out, m, p))

    return Passes(read, update, update_and_read)


def _plain_passes(read: Callable[..., None], update: Callable[..., None]) -> Passes:
    """Return plain passes, the third being one after the other."""

    def update_and_read(
        state: F32Array,
        decay: np.float32,
        k: F32Array,
        delta: F32Array,
        k_next: F32Array,
        q_next: F32Array,
        out: F32Array,
        m: F32Array,
        p: F32Array,
    ) -> None:
        update(state, decay, k, delta, out)
        read(out, k_next, q_next, m, p)

    return Passes(read, update, update_and_read)


def pass_intrinsic(names: tuple[str, ...], emit: Callable[[Any, dict[str, Any]], None]) -> Any:
    """Return an intrinsic over a tuple of the operands `names`: float32 arrays, but `decay`, a float32.

    Rows of arrays are contiguous. `emit` takes the builder and the operands by name: addresses of arrays, `decay`'s
    value, n_rows, n_columns and stride of the array `state`, and out_stride where there is an `out`. Strides count
    floats.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def emitted(_typing_context: Any, operands: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values = cgutils.unpack_tuple(builder, arguments[0])
            given: dict[str, Any] = {}
            for name, kind, value in zip(names, operands, values, strict=True):
                if name == "decay":
                    given[name] = value
                    continue
                array = context.make_array(kind)(context, builder, value)
                given[name] = array.data
                if name in ("state", "out"):
                    stride = builder.sdiv(builder.extract_value(array.strides, 0), INDEX(4))
                    given["stride" if name == "state" else "out_stride"] = stride
                if name == "state":
                    given["n_rows"], given["n_columns"] = cgutils.unpack_tuple(builder, array.shape)
            emit(builder, given)
            return context.get_dummy_value()

        return types.void(operands), generate

    return emitted
