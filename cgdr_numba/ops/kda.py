"""Kimi Delta Attention, whose channels forget one by one: fla's names and layout, for prefill and for decode."""

from typing import Any, Literal, Never

from numpy.typing import NDArray

from cgdr_numba.backends import RecurrentOptions
from cgdr_numba.core.contract import Tensors
from cgdr_numba.core.gate_options import Channels, GateOptions, KdaOptions
from cgdr_numba.ops.fla import FlaOptions, call_recurrent
from cgdr_numba.ops.keywords import refuse_not_offered, refuse_unknown

Array = NDArray[Any]


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: object = None,
    backend: Literal["fast", "golden"] = "fast",
    threads: int | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    **unknown: Never,
) -> tuple[Array, Array | None]:
    """Run S[d] <- e^g[d] S[d]; S <- S + k (beta (v - S^T k))^T; o = scale S^T q over every token of every sequence.

    Tensors are NumPy arrays, or torch tensors on the CPU, all of a call alike: both are read where they lie, and
    results come back as what q is.

    Args:
        q: Queries [B, T, Hk, Dk]; float16, bfloat16 or float32 (golden: float64 as well). Any strides.
        k: Keys, shape and dtype of q. They should have length 1 at the most, or the state grows.
        v: Values [B, T, Hv, Dv], dtype of q. Hv is a multiple of Hk; value head h uses key head h // (Hv / Hk).
        g: Natural log of the decay of every channel of a key [B, T, Hv, Dk], any float dtype; not restricted to
            g <= 0.
        beta: How much of the error is written [B, T, Hv], any float dtype.
        scale: Factor on q; None means Dk^-0.5.
        initial_state: [N, Hv, Dk, Dv], any float dtype; [N, Hv, Dv, Dk] with state_v_first. None means zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k first, in float32: x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: Whether g holds raw projections, and the log decay is -exp(A_log) softplus(g + dt_bias),
            or lower_bound sigmoid(exp(A_log) (g + dt_bias)) where lower_bound is given.
        A_log: Logarithm of each head's rate [Hv], any float dtype; None means a rate of 1. An error without
            use_gate_in_kernel.
        dt_bias: Added to g, one number a channel: [Hv * Dk] or [Hv, Dk], any float dtype. None means zeros. An error
            without use_gate_in_kernel.
        use_beta_sigmoid_in_kernel: Whether beta holds logits, and sigmoid(beta) is written.
        allow_neg_eigval: Whether the sigmoid is doubled; an error without use_beta_sigmoid_in_kernel.
        safe_gate: fla's promise that gates are bounded, which asks for lower_bound with use_gate_in_kernel. Results
            are the same with and without it: no gate is too low here.
        lower_bound: What the bounded form of the gate approaches, from -5 to below 0. None means the form with
            softplus. An error without use_gate_in_kernel.
        state_v_first: Whether states are [N, Hv, Dv, Dk], in and out.
        cu_seqlens: Sums of lengths [N + 1] from 0 to T, integers; B must be 1. None makes every batch row a sequence.
        backend: "fast" (default) or "golden".
        threads: Threads to run on, from 1 to numba's number; None takes numba's setting. Golden uses one.
        disable_recompute: Not offered: it concerns fla's backward pass.
        return_intermediate_states: Not offered: no state between chunks is kept.
        unknown: Nothing; any other keyword is a TypeError.

    Returns:
        (out [B, T, Hv, Dv] in q's dtype, final state or None). The state is float32 (float64 in golden for float64
        inputs), in the layout of initial_state. A sequence without tokens passes its state through.

    Raises:
        ContractError: Shapes, lengths or options break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.
        UnsupportedError: An option that is not offered, a torch tensor on another device, or one that requires grad
            while torch records gradients; a NotImplementedError.

    Numerics:
        golden: float64 throughout, rounded once at the end.

        fast: float32, token by token, whatever the gates are: no decay between two tokens is ever formed, so nothing
        overflows where channels differ by far. Tiles of 64 value columns stay in the first-level cache. That takes 1.4
        to 1.9 times as long as `chunk_gated_delta_rule` at the same shape (2048 tokens, 16/32 heads of 128: 74 ms
        beside 40 ms on one core of a Zen 5; on two cores 1.7 to 1.8 times). The decay of a channel is exp within an
        ulp of float32, applied to the state as the formula says; columns are chains of fused multiply-adds over Dk.
        Both state layouts have the same bits, and `fused_recurrent_kda` has them too: a call may be split at any token
        with the float32 state carried, and threads, strides, packing and batch mates change no bit.

        Gates that are given raw are computed in float64 and rounded once to float32 (golden with float64 q: not at
        all), on one thread before all else: 24 to 38 ms more at that shape.

    Source:
        Signature of flash-linear-attention 0.6.0 (keyword-only behind the tensors).

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import chunk_kda
        >>> k = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
        >>> v, beta = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
        >>> g, state = np.array([-1.0, -2.0]).reshape(1, 1, 1, 2), np.ones((1, 1, 2, 1), np.float32)
        >>> out, state = chunk_kda(np.ones_like(k), k, v, g, beta, scale=1.0, initial_state=state,
        ...     output_final_state=True)
        >>> print(out.item(), state.ravel())
        0.5032147169113159 [0.36787945 0.13533528]
    """
    op = "chunk_kda"
    refuse_unknown(op, unknown)
    refuse_not_offered(op, disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states)
    return call_recurrent(
        op,
        Tensors(q, k, v, None, beta, initial_state),
        FlaOptions(
            scale,
            use_qk_l2norm_in_kernel,
            state_v_first,
            cu_seqlens,
            output_final_state,
            GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            Channels(gk=g, kda=KdaOptions(safe_gate, lower_bound)),
        ),
        RecurrentOptions(backend, threads, None, initial_state),
    )


def fused_recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: object = None,
    out_state: Array | None = None,
    backend: Literal["fast", "golden"] = "fast",
    threads: int | None = None,
    **unknown: Never,
) -> tuple[Array, Array | None]:
    """Run S[d] <- e^g[d] S[d]; S <- S + k (beta (v - S^T k))^T; o = scale S^T q token by token, for decode.

    Tensors are NumPy arrays, or torch tensors on the CPU, all of a call alike: both are read where they lie, and
    results come back as what q is.

    Args:
        q: As in `chunk_kda`, like all that is not named here.
        k: As in `chunk_kda`.
        v: As in `chunk_kda`.
        g: As in `chunk_kda`.
        beta: As in `chunk_kda`.
        A_log: As in `chunk_kda`.
        dt_bias: As in `chunk_kda`.
        scale: As in `chunk_kda`.
        initial_state: As in `chunk_kda`.
        output_final_state: As in `chunk_kda`.
        use_qk_l2norm_in_kernel: As in `chunk_kda`.
        use_gate_in_kernel: As in `chunk_kda`.
        use_beta_sigmoid_in_kernel: As in `chunk_kda`.
        allow_neg_eigval: As in `chunk_kda`.
        safe_gate: As in `chunk_kda`.
        lower_bound: As in `chunk_kda`.
        state_v_first: As in `chunk_kda`.
        cu_seqlens: As in `chunk_kda`.
        out_state: Fast only: where the final state is written, float32 in initial_state's layout with adjacent
            elements in a row. It may be initial_state itself; any other overlap with an input is refused.
        backend: "fast" (default) or "golden".
        threads: As in `chunk_kda`.
        unknown: Nothing; any other keyword is a TypeError.

    Returns:
        As `chunk_kda`; the state is out_state where that was given.

    Raises:
        ContractError: Shapes, lengths or options break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.

    Numerics:
        Those of `chunk_kda`, bit for bit.

    Source:
        Signature of flash-linear-attention 0.6.0 (keyword-only behind the tensors).

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import fused_recurrent_kda
        >>> one, state = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 8, np.float32)
        >>> beta = np.full((1, 1, 1), 0.5)
        >>> for v in (2, 4, 6):
        ...     out, _ = fused_recurrent_kda(one, one, v * one, np.log(0.5 * one), beta, scale=1.0,
        ...         initial_state=state, out_state=state)
        ...     print(out.item(), state.item())
        3.0 3.0
        2.75 2.75
        3.6875 3.6875
    """
    op = "fused_recurrent_kda"
    refuse_unknown(op, unknown)
    return call_recurrent(
        op,
        Tensors(q, k, v, None, beta, initial_state),
        FlaOptions(
            scale,
            use_qk_l2norm_in_kernel,
            state_v_first,
            cu_seqlens,
            output_final_state,
            GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval),
            Channels(gk=g, kda=KdaOptions(safe_gate, lower_bound)),
        ),
        RecurrentOptions(backend, threads, out_state, initial_state),
    )
