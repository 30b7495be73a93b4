"""Torch tensors seen as NumPy arrays and back, without a copy. Torch is never imported: who has a tensor has it."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import BFLOAT16
from cgdr_numba.errors import DtypeError, UnsupportedError

_WORD = np.dtype(np.int16)
"""What carries bfloat16 between the two libraries, neither of which knows the other's."""


def is_tensor(value: object) -> bool:
    """Return whether `value` is a torch tensor."""
    if type(value) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def as_arrays(op: str, **tensors: object) -> tuple[Any, ...]:
    """Return views of a call's tensors in their order, with their strides; what is None stays None.

    Raises:
        DtypeError: One is no torch tensor, or a kind of tensor whose elements NumPy cannot see.
        UnsupportedError: A tensor is not in the CPU's memory, or asks for gradients.
    """
    return tuple([None if value is None else _as_array(op, name, value) for name, value in tensors.items()])


def as_lengths(op: str, value: object) -> object:
    """Return lengths or their sums as an array where they are a tensor; lists and arrays are taken beside tensors."""
    return _as_array(op, "cu_seqlens", value) if is_tensor(value) else value


def as_tensors(*arrays: NDArray[Any] | None) -> tuple[Any, ...]:
    """Return torch tensors over the memory of a call's results; what is None stays None."""
    return tuple([None if array is None else as_tensor(array) for array in arrays])


def as_tensor(array: NDArray[Any]) -> Any:
    """Return a torch tensor over the memory of a writable array."""
    torch: Any = sys.modules["torch"]
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(_WORD)).view(torch.bfloat16)
    return torch.from_numpy(array)


def records_gradients(*tensors: Any) -> bool:
    """Return whether torch would record gradients of what is computed from the tensors."""
    return sys.modules["torch"].is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def new_tensor(like: Any) -> Any:
    """Return an uninitialised contiguous tensor of another's shape and dtype, for what a call returns."""
    return like.new_empty(like.shape)


def _as_array(op: str, name: str, value: Any) -> NDArray[Any]:
    """Return a view of a tensor."""
    torch: Any = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        kind = type(value)
        came = f"{kind.__module__}.{kind.__qualname__}"
        raise DtypeError(f"{op}: `{name}` must be a torch.Tensor, as the first argument is one, got {came}")
    if not value.is_cpu:
        raise UnsupportedError(f"{op}: `{name}` must be in the CPU's memory, got a tensor on {value.device}")
    if value.requires_grad:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{op}: `{name}` must not require grad, since no gradients are computed here: call under "
                "torch.no_grad(), or give it detached"
            )
        value = value.detach()
    try:
        if value.dtype is torch.bfloat16:
            return value.view(torch.int16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
        return value.numpy()  # type: ignore[no-any-return]
    except (RuntimeError, TypeError) as reason:
        text = " ".join(str(reason).split())
        raise DtypeError(f"{op}: `{name}` must be a tensor of plain numbers in memory: {text}") from reason
