"""The recurrent operator (decode): fla's name and layout."""

from typing import Any, Literal, Never

from numpy.typing import NDArray

from cgdr_numba.backends import RecurrentOptions
from cgdr_numba.core.contract import Tensors
from cgdr_numba.core.gate_options import NO_CHANNELS, Channels, GateOptions
from cgdr_numba.ops.fla import FlaOptions, call_recurrent
from cgdr_numba.ops.keywords import refuse_unknown

Array = NDArray[Any]


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: object = None,
    out_state: Array | None = None,
    backend: Literal["fast", "golden"] = "fast",
    threads: int | None = None,
    **unknown: Never,
) -> tuple[Array, Array | None]:
    """Run S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q token by token: decode, and short prefills.

    Tensors are NumPy arrays, or torch tensors on the CPU, all of a call alike: both are read where they lie, and
    results come back as what q is.

    Args:
        q: Queries [B, T, Hk, Dk]; float16, bfloat16 or float32 (golden: float64 as well). Any strides.
        k: Keys, shape and dtype of q.
        v: Values [B, T, Hv, Dv], dtype of q. Hv is a multiple of Hk; value head h uses key head h // (Hv / Hk).
        g: Natural log of the decay [B, T, Hv], any float dtype; not restricted to g <= 0. None means zeros.
        gk: Second log decay, of every channel of a key [B, T, Hv, Dk], any float dtype: S[d] <- e^gk[d] S[d] behind g.
            None means zeros.
        gv: Third log decay, of every column of a value [B, T, Hv, Dv], any float dtype. None means zeros.
        beta: How much of the error is written [B, T, Hv], any float dtype. None means ones.
        scale: Factor on q; None means Dk^-0.5.
        initial_state: [N, Hv, Dk, Dv], any float dtype; [N, Hv, Dv, Dk] with state_v_first. None means zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k first, in float32: x / sqrt(sum x^2 + 1e-6).
        use_beta_sigmoid_in_kernel: Whether beta holds logits, and sigmoid(beta) is written. beta must be given then.
        use_gate_in_kernel: Whether g holds raw projections, and the log decay is -exp(A_log) softplus(g + dt_bias).
            g and A_log must be given then.
        A_log: Logarithm of each head's decay rate [Hv], any float dtype; an error without use_gate_in_kernel.
        dt_bias: Added to g [Hv], any float dtype; None means zeros. An error without use_gate_in_kernel.
        allow_neg_eigval: Whether the sigmoid is doubled; an error without use_beta_sigmoid_in_kernel.
        state_v_first: Whether states are [N, Hv, Dv, Dk], in and out.
        cu_seqlens: Sums of lengths [N + 1] from 0 to T, integers; B must be 1. None makes every batch row a sequence.
        out_state: Fast only: where the final state is written, float32 in initial_state's layout with adjacent
            elements in a row. It may be initial_state itself; any other overlap with an input is refused.
        backend: "fast" (default) or "golden".
        threads: Threads to run on, from 1 to numba's number. None takes numba's setting for this Python thread, but no
            more than the process may use cores, by its affinity mask and its container's quota. Golden uses one.
        unknown: Nothing; any other keyword is a TypeError.

    Returns:
        (out [B, T, Hv, Dv] in q's dtype, final state or None). The state is float32 (float64 in golden for float64
        inputs), in the layout of initial_state; it is out_state where that was given. A sequence without tokens
        passes its state through.

    Raises:
        ContractError: Shapes, lengths or options break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.
        UnsupportedError: backend="faithful", a torch tensor on another device, or one that requires grad while torch
            records gradients; a NotImplementedError.

    Numerics:
        fast: float32. The decay is applied to S^T k and S^T q instead of S before them, and o = a S^T q + (k . q)
        delta, so that a token crosses the state once. Columns are chains of fused multiply-adds over Dk (K first), or
        sums of such chains by lanes (V first). Splitting a call at any token, with the float32 state carried, changes
        no bit; nor do threads, strides or batch mates. With gk or gv decays are applied to S, one after another, each
        product rounded, before S^T k and S^T q are formed; both state layouts have the same bits then. Where gk is the
        only decay, several tokens cross the state once each, else twice.

        Gates that are given raw are computed in float64 and rounded once to float32 (golden with float64 q: not at
        all), as `fused_gdn_gating` has them: results are those of a call with g and beta computed before.

    Source:
        Signature of flash-linear-attention 0.6.0.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import fused_recurrent_gated_delta_rule
        >>> one, state = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 8, np.float32)
        >>> g, beta = np.full((1, 1, 1), np.log(0.5)), np.full((1, 1, 1), 0.5)
        >>> for v in (2, 4, 6):
        ...     out, state = fused_recurrent_gated_delta_rule(one, one, v * one, g=g, beta=beta, scale=1.0,
        ...         initial_state=state, output_final_state=True)
        ...     print(out.item(), state.item())
        3.0 3.0
        2.75 2.75
        3.6875 3.6875
    """
    op = "fused_recurrent_gated_delta_rule"
    refuse_unknown(op, unknown)
    return call_recurrent(
        op,
        Tensors(q, k, v, g, beta, initial_state),
        FlaOptions(
            scale,
            use_qk_l2norm_in_kernel,
            state_v_first,
            cu_seqlens,
            output_final_state,
            GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            NO_CHANNELS if gk is None and gv is None else Channels(gk, gv),
        ),
        RecurrentOptions(backend, threads, out_state, initial_state),
    )
