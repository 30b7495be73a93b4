"""How a function of fla's family becomes a torch custom op: schema, CPU code, fake results, and no backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cgdr_numba.errors import UnsupportedError

_OPTIONS = (
    "float? scale=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
    "bool use_gate_in_kernel=False, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "bool state_v_first=False"
)
"""What all ops take by name."""


def define(function: Callable[..., Any], required: str, optional: str, more_options: str = "") -> None:
    """Register ``torch.ops.cgdr_numba.<name>`` for a function of that name.

    Args:
        function: It takes tensors and options by name, and returns out and the final state or None.
        required: Names of the tensors that have to be given, q, k and v among them.
        optional: Names of those that may be None. All tensors are positional, as torch asks of ops that autograd knows.
        more_options: Schema of further options.
    """
    name, names = function.__name__, (*required.split(), *optional.split())
    qualified = f"cgdr_numba::{name}"

    def run(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Run the function on tensors that exist; a state that nobody asked for is empty."""
        named = dict(zip(names, tensors, strict=False))  # without those at the end that were left out
        out, state = function(**named, **options)
        return _contiguous(out), out.new_empty(0, dtype=torch.float32) if state is None else _contiguous(state)

    def fake(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return tensors of the results' shapes, dtypes and strides."""
        return _fake(name, dict(zip(names, tensors, strict=False)), options)

    def no_backward(_: Any, *__: Any) -> None:
        """Refuse to be differentiated."""
        raise UnsupportedError(
            f"{name}: no gradients are computed here; train through transformers' or fla's functions"
        )

    torch.library.define(qualified, _schema(required, optional, more_options), tags=(torch.Tag.flexible_layout,))
    torch.library.impl(qualified, "CPU", run)
    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, no_backward)


def _schema(required: str, optional: str, more_options: str) -> str:
    """Return the schema of an op that writes into none of its arguments."""
    arguments = [f"Tensor {name}" for name in required.split()]
    arguments += [f"Tensor? {name}=None" for name in optional.split()]
    arguments += ["*", _OPTIONS, *([more_options] if more_options else [])]
    return f"({', '.join(arguments)}) -> (Tensor, Tensor)"


def _contiguous(result: Tensor) -> Tensor:
    """Return a result with the strides that torch gives its shape; NumPy has other ones where there is no element."""
    return result if result.numel() else result.new_empty(result.shape)


def _fake(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return new results without elements' values: both contiguous, the state float32."""
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors.get("cu_seqlens")
    # torch comes here with real tensors, too, where one among them is on "meta".
    for key, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise UnsupportedError(
                f"{name}: `{key}` must be where `q` is, on {q.device}, got a tensor on {tensor.device}"
            )
    n_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    widths = (v.shape[3], q.shape[3]) if options.get("state_v_first", False) else (q.shape[3], v.shape[3])
    state = (n_sequences, v.shape[2], *widths) if options.get("output_final_state", False) else (0,)
    return q.new_empty(v.shape), q.new_empty(state, dtype=torch.float32)
