"""The operators of fla's names as torch custom ops, which `torch.compile` and `torch.export` keep as one node each.

Importing this module registers ``torch.ops.cgdr_numba.chunk_gated_delta_rule``, ``fused_recurrent_gated_delta_rule``,
``chunk_kda`` and ``fused_recurrent_kda``. An op has two results, always; where no final state is asked for, the second
is empty. The functions here return None for it, as fla's do. No op writes into its arguments: there is no out_state.

Eager code needs none of this: `cgdr_numba.chunk_gated_delta_rule` takes torch tensors as it is, and checks more
cheaply.
"""

from typing import Any

import torch
from torch import Tensor

import cgdr_numba
from cgdr_numba.integrations.custom_ops import define

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]

define(cgdr_numba.chunk_gated_delta_rule, "q k v", "g beta initial_state cu_seqlens A_log dt_bias")
define(cgdr_numba.fused_recurrent_gated_delta_rule, "q k v", "g beta initial_state cu_seqlens A_log dt_bias gk gv")
for _kda in (cgdr_numba.chunk_kda, cgdr_numba.fused_recurrent_kda):
    define(
        _kda, "q k v g beta", "initial_state cu_seqlens A_log dt_bias", "bool safe_gate=False, float? lower_bound=None"
    )


def _call(op: Any, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Run an op; its second result is the final state where that was asked for."""
    out, state = op(*tensors, **options)
    return out, state if options["output_final_state"] else None


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
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
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
        use_gate_in_kernel: Whether g holds raw projections, and the log decay is -exp(A_log) softplus(g + dt_bias).
        A_log: Logarithm of each head's decay rate [Hv]; an error without use_gate_in_kernel.
        dt_bias: Added to g [Hv]; None means zeros. An error without use_gate_in_kernel.
        use_beta_sigmoid_in_kernel: Whether beta holds logits, and sigmoid(beta) is written.
        allow_neg_eigval: Whether the sigmoid is doubled; an error without use_beta_sigmoid_in_kernel.
        state_v_first: Whether states are [N, Hv, Dv, Dk], in and out.
        cu_seqlens: Sums of lengths [N + 1] from 0 to T, integers; B must be 1. None makes every batch row a sequence.

    Returns:
        (out [B, T, Hv, Dv] in q's dtype, final state in float32 or None), new contiguous tensors.

    Raises:
        ContractError: Shapes, lengths or options break the contract; when the op runs.
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
    return _call(
        torch.ops.cgdr_numba.chunk_gated_delta_rule,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `cgdr_numba.fused_recurrent_gated_delta_rule` on fast as one torch op: decode, and short prefills.

    Arguments, results, errors and numerics are those of `chunk_gated_delta_rule` here, token by token; gk
    [B, T, Hv, Dk] and gv [B, T, Hv, Dv] are further log decays, of every channel of a key and every column of a value.

    Example:
        >>> import pytest; torch = pytest.importorskip("torch")
        >>> from cgdr_numba.integrations.torch import fused_recurrent_gated_delta_rule
        >>> one = torch.ones(1, 1, 1, 1)
        >>> out, state = fused_recurrent_gated_delta_rule(one, one, 6 * one, scale=1.0, output_final_state=True)
        >>> out.item(), state.item()
        (6.0, 6.0)
    """
    return _call(
        torch.ops.cgdr_numba.fused_recurrent_gated_delta_rule,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        gk,
        gv,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `cgdr_numba.chunk_kda` on fast as one torch op: as `chunk_gated_delta_rule`, with S[d] <- e^g[d] S[d].

    Arguments, results, errors and numerics are those of `chunk_gated_delta_rule` here, but for these.

    Args:
        q: As in `chunk_gated_delta_rule`, like all that is not named here.
        k: As in `chunk_gated_delta_rule`.
        v: As in `chunk_gated_delta_rule`.
        g: Natural log of the decay of every channel of a key [B, T, Hv, Dk], any float dtype.
        beta: How much of the error is written [B, T, Hv], any float dtype.
        scale: As in `chunk_gated_delta_rule`.
        initial_state: As in `chunk_gated_delta_rule`.
        output_final_state: As in `chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel: As in `chunk_gated_delta_rule`.
        use_gate_in_kernel: Whether g holds raw projections, and the log decay is -exp(A_log) softplus(g + dt_bias), or
            lower_bound sigmoid(exp(A_log) (g + dt_bias)) where lower_bound is given.
        A_log: Logarithm of each head's rate [Hv]; None means a rate of 1.
        dt_bias: Added to g, [Hv * Dk] or [Hv, Dk]; None means zeros.
        use_beta_sigmoid_in_kernel: As in `chunk_gated_delta_rule`.
        allow_neg_eigval: As in `chunk_gated_delta_rule`.
        safe_gate: fla's promise that gates are bounded, which asks for lower_bound; it changes no result.
        lower_bound: What the bounded form of the gate approaches, from -5 to below 0.
        state_v_first: As in `chunk_gated_delta_rule`.
        cu_seqlens: As in `chunk_gated_delta_rule`.

    Example:
        >>> import pytest; torch = pytest.importorskip("torch")
        >>> from cgdr_numba.integrations.torch import chunk_kda
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([2.0, 4.0, 6.0]).view(1, 3, 1, 1)
        >>> half = torch.full((1, 3, 1), 0.5)
        >>> out, state = chunk_kda(one, one, v, half.log()[..., None], half, scale=1.0, output_final_state=True,
        ...     initial_state=torch.full((1, 1, 1, 1), 8.0))
        >>> out.flatten().tolist(), state.item()
        ([3.0, 2.75, 3.6875], 3.6875)
    """
    return _call(
        torch.ops.cgdr_numba.chunk_kda,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run `cgdr_numba.fused_recurrent_kda` on fast as one torch op; all is that of `chunk_kda` here, bit for bit.

    Example:
        >>> import pytest; torch = pytest.importorskip("torch")
        >>> from cgdr_numba.integrations.torch import fused_recurrent_kda
        >>> one = torch.ones(1, 1, 1, 1)
        >>> out, state = fused_recurrent_kda(one, one, 6 * one, -one, one[0], scale=1.0, output_final_state=True)
        >>> out.item(), state.item()
        (6.0, 6.0)
    """
    return _call(
        torch.ops.cgdr_numba.fused_recurrent_kda,
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        A_log,
        dt_bias,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
    )
