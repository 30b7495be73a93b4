"""A numba intrinsic out of a function that emits a pass over a state and its operands' names."""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from cgdr_numba.core.fast.simd import INDEX


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
