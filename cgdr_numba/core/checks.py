"""The single checks that contracts are made of; each names the argument, the rule with its numbers, and what came."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import KINDS
from cgdr_numba.core.tensors import is_tensor
from cgdr_numba.errors import ContractError, DtypeError

FLOATS = "float16, bfloat16, float32 or float64"


class Checks:
    """Checks for one public function; `op` begins every message."""

    def __init__(self, op: str) -> None:
        """Keep the public function's name."""
        self.op = op

    def error(self, text: str) -> ContractError:
        """Return a ContractError that begins with the function's name."""
        return ContractError(f"{self.op}: {text}")

    def array(self, name: str, value: object) -> NDArray[Any]:
        """Return `value` if it is a plain NumPy array in native byte order."""
        if type(value) is np.ndarray and value.dtype.isnative:
            return value
        if not isinstance(value, np.ndarray):
            kind = type(value)
            reason = ": fla's functions take torch tensors, all of a call or none" if is_tensor(value) else ""
            came = f"{kind.__module__}.{kind.__qualname__}{reason}"
            raise DtypeError(f"{self.op}: `{name}` must be a NumPy array, got {came}")
        if isinstance(value, np.ma.MaskedArray):
            raise DtypeError(f"{self.op}: `{name}` must be a NumPy array without a mask, got a MaskedArray")
        if not value.dtype.isnative:
            raise DtypeError(f"{self.op}: `{name}` must be in native byte order, got dtype {value.dtype.str}")
        return value.view(np.ndarray)

    def rank(self, name: str, array: NDArray[Any], axes: str) -> None:
        """Refuse an array with another number of axes than `axes` ("T, Hk, Dk") names."""
        n_axes = axes.count(",") + 1
        if array.ndim != n_axes:
            raise self.error(f"`{name}` must be [{axes}] ({n_axes} axes), got {array.ndim} axes: {list(array.shape)}")

    def shape(self, name: str, array: NDArray[Any], axes: str, expected: Sequence[int]) -> None:
        """Refuse an array of another shape than `expected`."""
        if array.shape != tuple(expected):
            raise self.error(f"`{name}` must be [{axes}] = {list(expected)}, got {list(array.shape)}")

    def floating(self, name: str, array: NDArray[Any]) -> None:
        """Refuse a dtype that is not one of the four float dtypes."""
        if array.dtype not in KINDS:
            raise DtypeError(f"{self.op}: `{name}` must be {FLOATS}, got {array.dtype}")

    def same_dtype(self, name: str, array: NDArray[Any], first_name: str, first: NDArray[Any]) -> None:
        """Refuse a dtype that differs from the first tensor's."""
        if array.dtype != first.dtype:
            raise DtypeError(
                f"{self.op}: `{name}` must have the dtype of `{first_name}`, {first.dtype}, got {array.dtype}"
            )

    def integers(self, name: str, value: object) -> NDArray[np.int64]:
        """Return a vector of integers as int64; takes arrays of any integer dtype, lists and tuples."""
        if isinstance(value, np.ndarray):
            array = self.array(name, value)
        elif isinstance(value, (list, tuple, range)):
            array = self._from_sequence(name, value)
        else:
            kind = type(value)
            raise DtypeError(
                f"{self.op}: `{name}` must be a vector of integers, got {kind.__module__}.{kind.__qualname__}"
            )
        if array.dtype.kind not in "iu":
            raise DtypeError(f"{self.op}: `{name}` must hold integers, got {array.dtype}")
        if array.ndim != 1:
            raise self.error(f"`{name}` must have one axis, got {array.ndim} axes: {list(array.shape)}")
        if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise self.error(f"`{name}` must fit in int64, got {int(array.max())}")
        return array.astype(np.int64)

    def _from_sequence(self, name: str, value: Sequence[object]) -> NDArray[Any]:
        """Return a list of integers as an array; what NumPy would turn into floats or objects is named instead."""
        for entry in value:
            if not isinstance(entry, (int, np.integer)) or isinstance(entry, bool):
                raise DtypeError(f"{self.op}: `{name}` must hold integers, got {entry!r}")
            if not -(2**63) <= entry < 2**63:
                raise self.error(f"`{name}` must fit in int64, got {entry}")
        return np.array(value, dtype=np.int64)

    def flag(self, name: str, value: object) -> bool:
        """Return a switch; only True and False (Python's or NumPy's) are taken."""
        if value is True or value is False:
            return value
        if not isinstance(value, np.bool_):
            raise DtypeError(f"{self.op}: `{name}` must be True or False, got {value!r}")
        return bool(value)

    def scale(self, value: object, default: float, name: str = "scale") -> float:
        """Return the scale, or another number, as a float; `default` where it is None."""
        if value is None:
            return default
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating)):
            raise DtypeError(f"{self.op}: `{name}` must be a real number or None, got {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise self.error(f"`{name}` must be a number that float64 holds, got an integer beyond it") from None

    def choice(self, name: str, value: object, options: Sequence[str]) -> str:
        """Return `value` if it is one of the options."""
        if not isinstance(value, str) or value not in options:
            listed = " or ".join(f'"{option}"' for option in options)
            raise self.error(f"`{name}` must be {listed}, got {value!r}")
        return value
