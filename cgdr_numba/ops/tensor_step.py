"""A prepared decode step on torch tensors: their addresses go to the kernel, and no array is made of them."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.launch import PreparedSteps
from cgdr_numba.core.tensors import new_tensor


class TensorStep:
    """A step on tensors of the same shapes, dtypes and strides as those that it was made with.

    Seeing a tensor as an array takes torch and NumPy a microsecond, or five where a model's weights have gone through
    the caches since, and the kernel unpacks the array again: half of a step's time in a model.
    """

    def __init__(self, steps: PreparedSteps, tensors: tuple[Any, ...], arrays: tuple[NDArray[Any], ...]) -> None:
        """Take the step, and its tensors with the arrays over their memory."""
        v = arrays[2]
        self._run = steps.keep(arrays, np.empty(v.shape, v.dtype))
        self._expected = [(x.shape, x.stride(), x.dtype) for x in tensors]
        self._plain_kind = sys.modules["torch"].Tensor

    def run(self, *tensors: Any) -> Any:
        """Run q, k, v, g, beta, state, the state in place, and return out; whether gradients are recorded is not asked.

        Returns None, having done nothing, for tensors that are not like those at the start: of other strides, of
        another kind (subclasses, lazily negated ones), or not in the CPU's memory.
        """
        run, kind = self._run, self._plain_kind
        if run is None:
            return None
        for x, expected in zip(tensors, self._expected, strict=True):
            if type(x) is not kind or (x.shape, x.stride(), x.dtype) != expected or not x.is_cpu or x.is_neg():
                return None
        out = new_tensor(tensors[2])
        at = [x.data_ptr() for x in tensors]
        run((*at, at[5], out.data_ptr()))
        return out
