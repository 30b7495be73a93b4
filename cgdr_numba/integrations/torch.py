"""The operators of fla's names as torch custom ops, which `torch.compile` and `torch.export` keep as one node each.

Importing this module registers ``torch.ops.cgdr_numba.chunk_gated_delta_rule`` and
``torch.ops.cgdr_numba.fused_recurrent_gated_delta_rule``. An op has two results, always; where no final state is asked
for, the second is empty. The functions here return None for it, as fla's do.

Eager code needs none of this: `cgdr_numba.chunk_gated_delta_rule` takes torch tensors as it is, and checks more
cheaply.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cgdr_numba
from cgdr_numba.errors import UnsupportedError

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

_SIGNATURE = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g=None, Tensor? beta=None, Tensor? initial_state=None, "
    "Tensor? cu_seqlens=None, *, float? scale=None, bool output_final_state=False, "
    "bool use_qk_l2norm_in_kernel=False, bool state_v_first=False) -> (Tensor, Tensor)"
)
"""All tensors are positional, as torch asks of ops that autograd knows."""


def _define(name: str, function: Callable[..., Any]) -> None:
    """Register one op: its schema, its CPU code, what it returns under tracing, and that it has no backward."""
    qualified = f"cgdr_numba::{name}"

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Run the operator on tensors that exist; a state that nobody asked for is empty."""
        tensors = {"g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        out, state = function(q, k, v, **tensors, **options)
        return out, q.new_empty(0, dtype=torch.float32) if state is None else state

    def no_backward(_: Any, *__: Any) -> None:
        """Refuse to be differentiated."""
        raise UnsupportedError(
            f"{name}: no gradients are computed here; train through transformers' or fla's functions"
        )

    torch.library.define(qualified, _SIGNATURE, tags=(torch.Tag.flexible_layout,))
    torch.library.impl(qualified, "CPU", run)
    torch.library.register_fake(qualified, _fake)
    torch.library.register_autograd(qualified, no_backward)


def _fake(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _g: Tensor | None = None,
    _beta: Tensor | None = None,
    _initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return tensors of the results' shapes, dtypes and strides: all contiguous, the state float32."""
    n_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    widths = (v.shape[3], q.shape[3]) if options.get("state_v_first", False) else (q.shape[3], v.shape[3])
    state = (n_sequences, v.shape[2], *widths) if options.get("output_final_state", False) else (0,)
    return q.new_empty(v.shape), q.new_empty(state, dtype=torch.float32)


_define("chunk_gated_delta_rule", cgdr_numba.chunk_gated_delta_rule)
_define("fused_recurrent_gated_delta_rule", cgdr_numba.fused_recurrent_gated_delta_rule)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `cgdr_numba.chunk_gated_delta_rule` on fast as one torch op: S <- e^g S; S <- S + k (beta (v - S^T k))^T.

    Args:
        q: Queries [B, T, Hk, Dk] on the CPU; float16, bfloat16 or float32. Any strides.
        k: Keys, shape and dtype of q.
        v: Values [B, T, Hv, Dv], dtype of q.
        g: Natural log of the decay [B, T, Hv], any float dtype. None means zeros.
        beta: How much of the error is written [B, T, Hv], any float dtype. None means ones.
        scale: Factor on q; None means Dk^-0.5.
        initial_state: [N, Hv, Dk, Dv], any float dtype; [N, Hv, Dv, Dk] with state_v_first. None means zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k first, x / sqrt(sum x^2 + 1e-6).
        state_v_first: Whether states are [N, Hv, Dv, Dk], in and out.
        cu_seqlens: Sums of lengths [N + 1] from 0 to T, integers; B must be 1. None makes every batch row a sequence.

    Returns:
        (out [B, T, Hv, Dv] in q's dtype, final state in float32 or None), new contiguous tensors.

    Raises:
        ContractError: Shapes or lengths break the contract; when the op runs.
        UnsupportedError: From a backward pass: there are no gradients.

    Numerics:
        Bit for bit those of `cgdr_numba.chunk_gated_delta_rule`, compiled or not.

    Example:
        >>> import pytest; torch = pytest.importorskip("torch")
        >>> from cgdr_numba.integrations.torch import chunk_gated_delta_rule
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([2.0, 4.0, 6.0]).view(1, 3, 1, 1)
        >>> half = torch.full((1, 3, 1), 0.5)
        >>> out, state = chunk_gated_delta_rule(one, one, v, half.log(), half, scale=1.0, output_final_state=True,
        ...     initial_state=torch.full((1, 1, 1, 1), 8.0))
        >>> out.flatten().tolist(), state.item()
        ([3.0, 2.75, 3.6875], 3.6875)
    """
    out, state = torch.ops.cgdr_numba.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    return out, state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `cgdr_numba.fused_recurrent_gated_delta_rule` on fast as one torch op: decode, and short prefills.

    Arguments, results, errors and numerics are those of `chunk_gated_delta_rule` here, token by token.

    Example:
        >>> import pytest; torch = pytest.importorskip("torch")
        >>> from cgdr_numba.integrations.torch import fused_recurrent_gated_delta_rule
        >>> one = torch.ones(1, 1, 1, 1)
        >>> out, state = fused_recurrent_gated_delta_rule(one, one, 6 * one, scale=1.0, output_final_state=True)
        >>> out.item(), state.item()
        (6.0, 6.0)
    """
    out, state = torch.ops.cgdr_numba.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    return out, state if output_final_state else None
