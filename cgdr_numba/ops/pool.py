"""The recurrent operator over a pool of states (decode, drafted tokens): CANN's name and layout."""

from typing import Any, Literal

from numpy.typing import NDArray

from cgdr_numba.core.contract import Tensors
from cgdr_numba.core.pool_contract import PoolLengths, pool_problem
from cgdr_numba.core.slots import SlotIndices
from cgdr_numba.pool_backends import PoolOptions, run_pool
from cgdr_numba.sched.device import DeviceSpec
from cgdr_numba.sched.pool_plan import PoolPlan

Array = NDArray[Any]


def npu_recurrent_gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    state: Array,
    *,
    beta: Array,
    actual_seq_lengths: object,
    ssm_state_indices: object,
    scale: float | None = None,
    num_accepted_tokens: object = None,
    g: Array | None = None,
    gk: Array | None = None,
    seq_lens_format: Literal["lengths", "start+lengths", "cu"] = "lengths",
    read_indices: object = None,
    backend: Literal["faithful", "fast", "golden"] = "faithful",
    target: str | DeviceSpec | None = None,
    plan: PoolPlan | None = None,
    threads: int | None = None,
    overflow: Literal["ieee", "saturate"] = "ieee",
) -> Array:
    """Run S <- e^g S diag(e^gk); S <- S + (beta (v - S k)) k^T; o = scale S q over states that stay in a pool's slots.

    Args:
        query: [T, Nk, Dk], all sequences one after another; float16 as on the NPU, or bfloat16, float32 (golden:
            float64 as well). Not normalised here. Any strides.
        key: Shape and dtype of query.
        value: [T, Nv, Dv], dtype of query; Nv is a multiple of Nk.
        state: The pool [slots, Nv, Dv, Dk], updated in place: float16, bfloat16 or float32 (golden: float64 as well),
            writable, apart from the inputs in memory. Elements of a row must be adjacent; the strides of the other axes
            may be larger than their neighbours need (slots that are parts of larger pages), and anything else is
            refused.
        beta: [T, Nv], any float dtype.
        actual_seq_lengths: Which tokens belong together, integers as `seq_lens_format` says. Tokens in no sequence are
            padding and must have slot -1.
        ssm_state_indices: Slot of the state after each token [T], integers. -1 for all tokens of a sequence makes it
            padding: it is skipped, its rows of the result are zero. A slot may come several times in a sequence (the
            last token's state stays) and in no second sequence.
        scale: Factor on query; None means 1.0, as CANN has it (not Dk^-0.5).
        num_accepted_tokens: How many tokens of the run before stand [N], integers from 1 to the sequence's length; a
            sequence begins with the state in its slot of that number. None means 1. Not looked at for padding.
        g: Natural log of the decay [T, Nv], any float dtype; faithful rounds it to float32. None means zeros.
        gk: Second log decay, any float dtype: [T, Nv, Dk] by column of the state, or [T, Nv] by head. The second form
            is dropped with a warning where g is given, as the NPU's host code drops it silently. None means zeros.
        seq_lens_format: "lengths" (default; [N] lengths), "start+lengths" ([1 + N]: the first token, then lengths) or
            "cu" ([N + 1] sums that begin at 0).
        read_indices: Slots that sequences begin with [N], in place of those by accepted tokens; a slot that another
            sequence writes is refused.
        backend: "faithful" (default; the 310P kernel's order of operations, for sequences of up to 8 tokens), "fast"
            (float32 vector code, for any number of tokens) or "golden" (float64 token loop).
        target: Faithful only: device to plan for, "310p" (default), "host" or a DeviceSpec.
        plan: Faithful only: a plan of `plan_step` for these sizes, gates and dtypes; excludes target and threads.
        threads: Threads to run on, from 1 to numba's number; None takes numba's setting. Golden uses one.
        overflow: Faithful only: "ieee", or "saturate" as the 310P's vector unit does.

    Returns:
        out [T, Nv, Dv] in query's dtype. The pool holds the new states; slots that no token names are untouched.

    Raises:
        ContractError: Shapes, lengths, slots or options break the contract; a ValueError. Nothing was written.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.
        BudgetError: Faithful: no V tile fits the target's unified buffer, or the NPU's scratch would overflow it
            unseen; a ContractError. A plan of `plan_step` with a smaller v_step may fit.

    Numerics:
        golden: float64 throughout; outputs and states are rounded once, where they are written. faithful: float32 in
        the order of the 310P kernel: decays by g, then by gk; a row's product with k, 64 lanes by a tree of pairs and
        the rest one by one; two roundings where a row learns; outputs last. Where Dk is no multiple of 16 the lanes
        behind it are zeros (the NPU reads what lies next in memory). Only float16 is what the NPU takes, other dtypes
        run the same operations as an extension. golden and faithful give the same bits on every machine, for any
        threads, plan, strides and batch mates. On every backend a state stays unrounded from token to token within a
        call.

        fast: float32, with the bits of `fused_recurrent_gated_delta_rule` with state_v_first. States are read and
        written where they lie, some rows at a time that stay in the first-level cache for all tokens; of a slot that
        comes several times in a row the last state alone is written. For one package version and instruction set the
        bits depend on a (sequence, head)'s own rows and state, Dk, Dv, dtypes, and on whether gk is [T, Nv, Dk]: not
        on threads, batch mates, slots, strides, or how many tokens a call has. So a float32 pool that goes on behind n
        accepted tokens has the bits of a run that never saw the others. A 16-bit pool has them where that run, too,
        begins a call behind those n: what a call begins with was rounded.

    Source:
        torch_npu.npu_recurrent_gated_delta_rule; kernel 310P RecurrentGatedDeltaRule, revision 96ea3f55.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import npu_recurrent_gated_delta_rule
        >>> one, v = np.ones((3, 1, 1), np.float16), np.array([2, 4, 6], np.float16).reshape(3, 1, 1)
        >>> pool = np.array([8, 0, 0, 0], np.float32).reshape(4, 1, 1, 1)
        >>> out = npu_recurrent_gated_delta_rule(one, one, v, pool, beta=np.full((3, 1), 0.5),
        ...     g=np.full((3, 1), np.log(0.5)), actual_seq_lengths=[3], ssm_state_indices=[0, 2, 1], backend="golden")
        >>> out.ravel().tolist(), pool.ravel().tolist()
        ([3.0, 2.75, 3.6875], [3.0, 3.6875, 2.75, 0.0])
    """
    problem = pool_problem(
        "npu_recurrent_gated_delta_rule",
        Tensors(query, key, value, g, beta, state),
        gk=gk,
        scale=scale,
        lengths=PoolLengths(actual_seq_lengths, seq_lens_format),
        indices=SlotIndices(ssm_state_indices, num_accepted_tokens, read_indices),
    )
    return run_pool(problem, PoolOptions(backend, target, plan, threads, overflow))
