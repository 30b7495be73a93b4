"""The chunked operator (prefill): fla's names and layouts, and CANN's."""

from typing import Any, Literal, Never

from numpy.typing import NDArray

from cgdr_numba.backends import Options, run
from cgdr_numba.core.contract import Tensors, cann_problem
from cgdr_numba.core.gate_options import GateOptions
from cgdr_numba.ops.fla import FlaOptions, call_chunked
from cgdr_numba.ops.keywords import refuse_unknown
from cgdr_numba.sched.device import DeviceSpec
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import Plan

Array = NDArray[Any]
Backend = Literal["fast", "golden", "faithful"]


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    backend: Backend = "fast",
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
    target: str | DeviceSpec | None = None,
    plan: Plan | HostPlan | None = None,
    threads: int | None = None,
    overflow: Literal["ieee", "saturate"] = "ieee",
    axpy: Literal["two-roundings", "fused"] = "two-roundings",
    **unknown: Never,
) -> tuple[Array, Array | None]:
    """Run S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q over every token of every sequence.

    Tensors are NumPy arrays, or torch tensors on the CPU, all of a call alike: both are read where they lie, and
    results come back as what q is.

    Args:
        q: Queries [B, T, Hk, Dk]; float16, bfloat16 or float32 (golden: float64 as well). Any strides.
        k: Keys, shape and dtype of q. They should have length 1 at the most, or the state grows.
        v: Values [B, T, Hv, Dv], dtype of q. Hv is a multiple of Hk; value head h uses key head h // (Hv / Hk).
        g: Natural log of the decay [B, T, Hv], any float dtype; not restricted to g <= 0. None means zeros.
        beta: How much of the error is written [B, T, Hv], any float dtype. None means ones.
        backend: "fast" (default; float32 vector code), "golden" (float64 token loop) or "faithful" (the 310P kernel's
            order of operations).
        scale: Factor on q; None means Dk^-0.5.
        initial_state: [N, Hv, Dk, Dv], any float dtype; [N, Hv, Dv, Dk] with state_v_first. None means zeros.
        output_final_state: Whether the final state is returned.
        use_qk_l2norm_in_kernel: Normalise q and k first, x / sqrt(sum x^2 + 1e-6); faithful computes this in
            float32 and rounds to q's dtype.
        use_beta_sigmoid_in_kernel: Whether beta holds logits, and sigmoid(beta) is written. beta must be given then.
        use_gate_in_kernel: Whether g holds raw projections, and the log decay is -exp(A_log) softplus(g + dt_bias).
            g and A_log must be given then.
        A_log: Logarithm of each head's decay rate [Hv], any float dtype; an error without use_gate_in_kernel.
        dt_bias: Added to g [Hv], any float dtype; None means zeros. An error without use_gate_in_kernel.
        allow_neg_eigval: Whether the sigmoid is doubled; an error without use_beta_sigmoid_in_kernel.
        state_v_first: Whether states are [N, Hv, Dv, Dk], in and out.
        cu_seqlens: Sums of lengths [N + 1] from 0 to T, integers; B must be 1. None makes every batch row a sequence.
        target: Device to plan for: "310p" (faithful's default), "host" (fast's) or a DeviceSpec, whose cores are the
            bins of work and whose fast memory bounds the V tiles. Golden has none.
        plan: A plan of `plan_chunk` for the backend, these dims and lengths, and on faithful this dtype; excludes
            target and threads. Golden has none.
        threads: Threads to run on, from 1 to numba's number. None takes numba's setting for this Python thread, but no
            more than the process may use cores, by its affinity mask and its container's quota. Golden uses one.
            Without a target fast plans for as many.
        overflow: Faithful only: "ieee", or "saturate" as the 310P's vector unit does.
        axpy: Faithful only: whether Axpy rounds twice or once ("fused").
        unknown: Nothing; any other keyword is a TypeError.

    Returns:
        (out [B, T, Hv, Dv] in q's dtype, final state or None). The state is float32 (float64 in golden for float64
        inputs), in the layout of initial_state. A sequence without tokens passes its state through.

    Raises:
        ContractError: Shapes, lengths or options break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.
        BudgetError: Faithful: no V tile fits the target's unified buffer; a ContractError.
        UnsupportedError: An option that is not offered yet, a torch tensor on another device, or one that requires
            grad while torch records gradients; a NotImplementedError.

    Numerics:
        golden: float64 throughout, sums over Dk row by row, rounded once at the end. faithful: float32 in the order
        of the 310P kernel (see `cgdr_numba.core.phases`); only float16 is what the NPU takes, other dtypes run the
        same operations as an extension. Both give the same bits on every machine, for any threads, plan, strides and
        batch mates.

        fast: float32, in chunks of 16 tokens. K S and Q S are chains of fused multiply-adds with Dk ascending; the
        tokens of a chunk are taken in by forward substitution, without an inverse. Gates are summed in float64, and
        the decay between two tokens is the product of e^G and e^-G where a chunk's sums stay within 60, else the exp
        of the difference. The token loop of `fused_recurrent_gated_delta_rule` (K first) runs instead where a
        sequence's last chunk has up to 12 tokens, and for a chunk that holds a non-finite number, elements of q, k or
        beta above 2^10, gates that rise by more than e^10, or columns (by 16) whose state or change passes 2^50: so
        results are finite exactly where the token loop's are, and a non-finite input spoils no earlier token and no
        other head. A float32 key whose sum of squares leaves float32 is normalised to zero.

        For one package version, instruction set, dtype and state layout fast's bits of a (sequence, head) depend on
        its own rows, state, Dk and Dv alone: not on threads, plan, V tiles, batch mates, packing, alignment or strides.
        Splitting a call at multiples of 64 tokens, with the float32 state carried, changes no bit.

        Gates that are given raw are computed in float64 and rounded once to float32 (golden with float64 q: not at
        all), as `fused_gdn_gating` has them: results are those of a call with g and beta computed before.

    Source:
        Signature of flash-linear-attention 0.6.0 (keyword-only behind the tensors); kernel 310P
        ChunkGatedDeltaRule, revision 00e39ab5.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import chunk_gated_delta_rule
        >>> one = np.ones((1, 3, 1, 1), np.float32)
        >>> v = np.array([2, 4, 6], np.float32).reshape(1, 3, 1, 1)
        >>> g, beta = np.full((1, 3, 1), np.log(0.5)), np.full((1, 3, 1), 0.5)
        >>> out, state = chunk_gated_delta_rule(one, one, v, g, beta, backend="golden", scale=1.0,
        ...     initial_state=np.full((1, 1, 1, 1), 8.0), output_final_state=True)
        >>> out.ravel().tolist(), state.item()
        ([3.0, 2.75, 3.6875], 3.6875)
    """
    op = "chunk_gated_delta_rule"
    refuse_unknown(op, unknown)
    return call_chunked(
        op,
        Tensors(q, k, v, g, beta, initial_state),
        FlaOptions(
            scale,
            use_qk_l2norm_in_kernel,
            state_v_first,
            cu_seqlens,
            output_final_state,
            GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        ),
        Options(backend, target, plan, threads, overflow, axpy),
    )


def npu_chunk_gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    *,
    beta: Array,
    initial_state: Array,
    actual_seq_lengths: object,
    scale: float | None = None,
    g: Array | None = None,
    backend: Backend = "faithful",
    target: str | DeviceSpec | None = None,
    plan: Plan | HostPlan | None = None,
    threads: int | None = None,
    overflow: Literal["ieee", "saturate"] = "ieee",
    axpy: Literal["two-roundings", "fused"] = "two-roundings",
) -> tuple[Array, Array]:
    """Run the chunked Gated Delta Rule under CANN's names and layouts, so that a recorded NPU call replays unedited.

    Args:
        query: [T, Nk, Dk], all sequences one after another; float16 as on the NPU, or bfloat16, float32 (golden:
            float64 as well). Not normalised here. Any strides.
        key: Shape and dtype of query.
        value: [T, Nv, Dv], dtype of query; Nv is a multiple of Nk.
        beta: [T, Nv], any float dtype.
        initial_state: [N, Nv, Dv, Dk], any float dtype.
        actual_seq_lengths: Tokens of each sequence [N], integers with the sum T (lengths, not running sums).
        scale: Factor on query; None means 1.0, as CANN has it (not Dk^-0.5).
        g: Natural log of the decay [T, Nv], any float dtype; faithful rounds it to float32, where numbers below
            -3.4e38 become -inf. None means zeros.
        backend: "faithful" (default), "fast" or "golden".
        target: As in `chunk_gated_delta_rule`.
        plan: As in `chunk_gated_delta_rule`.
        threads: As in `chunk_gated_delta_rule`.
        overflow: As in `chunk_gated_delta_rule`.
        axpy: As in `chunk_gated_delta_rule`.

    Returns:
        (out [T, Nv, Dv] in query's dtype, final state [N, Nv, Dv, Dk] in initial_state's dtype). A sequence without
        tokens passes its state through (the NPU leaves that memory unwritten).

    Raises:
        ContractError: Shapes, lengths or options break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.
        BudgetError: Faithful: no V tile fits the target's unified buffer; a ContractError.

    Numerics:
        As in `chunk_gated_delta_rule`. fast rounds the final state once to initial_state's dtype, so a call may be
        split without a changed bit where that is float32.

    Source:
        torch_npu.npu_chunk_gated_delta_rule; kernel 310P ChunkGatedDeltaRule, revision 00e39ab5.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import npu_chunk_gated_delta_rule
        >>> q = np.eye(8, dtype=np.float16)[:, None, :]
        >>> v = np.arange(64, dtype=np.float16).reshape(8, 1, 8)
        >>> out, state = npu_chunk_gated_delta_rule(q, q, v, beta=np.ones((8, 1), np.float16),
        ...     initial_state=np.zeros((1, 1, 8, 8), np.float16), actual_seq_lengths=[8])
        >>> bool((out == v).all()), bool((state[0, 0].T == v[:, 0]).all())
        (True, True)
    """
    problem = cann_problem(
        "npu_chunk_gated_delta_rule",
        Tensors(query, key, value, g, beta, initial_state),
        scale=scale,
        actual_seq_lengths=actual_seq_lengths,
    )
    out, state = run(problem, Options(backend, target, plan, threads, overflow, axpy))
    return out[0], state
