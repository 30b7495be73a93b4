"""A prepared decode step on torch tensors: their addresses go to the kernel, and no array is made of them.

Seeing a tensor as an array takes torch and NumPy a microsecond, or five where a model's weights have gone through the
caches since, and the kernel unpacks the array again: half of a step's time in a model.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.launch import PreparedSteps
from cgdr_numba.core.tensors import new_tensor

TensorStep = Callable[[Any, Any, Any, Any, Any, Any], Any]


def tensor_step(steps: PreparedSteps, tensors: tuple[Any, ...], arrays: tuple[NDArray[Any], ...]) -> TensorStep | None:
    """Return a step on tensors of the shapes, dtypes and strides of those given, over whose memory `arrays` are.

    The step takes (q, k, v, g, beta, state), moves the state on in place, and returns out. It returns None, having done
    nothing, for tensors that are not like those at the start: of other strides, of another kind (subclasses, lazily
    negated ones), or not in the CPU's memory. Whether gradients are recorded it does not ask.

    Returns:
        The step; None without JIT, where kernels take no addresses.
    """
    v = arrays[2]
    launch = steps.keep(arrays, np.empty(v.shape, v.dtype))
    if launch is None:
        return None
    expected = [(x.shape, x.stride(), x.dtype) for x in tensors]
    plain_kind, result = sys.modules["torch"].Tensor, new_tensor

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        """Run the step; see `tensor_step`. Between layers of a model each object that is looked at costs."""
        for x, (shape, stride, dtype) in zip((q, k, v, g, beta, state), expected, strict=True):
            if (
                type(x) is not plain_kind
                or x.shape != shape
                or x.dtype is not dtype
                or x.stride() != stride
                or not x.is_cpu
                or x.is_neg()
            ):
                return None
        out, at = result(v), state.data_ptr()
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), at, at, out.data_ptr())
        return out

    return run
