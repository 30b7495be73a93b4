"""Recorded calls run again: planned, replayed through the public functions, compared with their references."""

from typing import Any, Final, cast

import numpy as np

from cgdr_numba.core.dtypes import FLOAT64, KINDS
from cgdr_numba.core.pool_contract import PoolProblem
from cgdr_numba.errors import DtypeError, UnsupportedError
from cgdr_numba.ops import npu_chunk_gated_delta_rule, npu_recurrent_gated_delta_rule
from cgdr_numba.parity.calls import AnyPlan, Array, RecordedCall
from cgdr_numba.parity.metrics import Comparison, compare_out, compare_state
from cgdr_numba.parity.operators import RECURRENT_OPERATOR
from cgdr_numba.sched.device import DeviceSpec
from cgdr_numba.sched.plan import PLANNED_BACKENDS, plan_chunk
from cgdr_numba.sched.pool_plan import plan_step

POOL_PLANNED: Final = ("faithful",)
"""The backends that run calls over a pool by a plan that can be looked at."""


def is_planned(call: RecordedCall, backend: str) -> bool:
    """Return whether a backend runs a call by a plan that `plan_call` makes."""
    return backend in (POOL_PLANNED if call.operator == RECURRENT_OPERATOR else PLANNED_BACKENDS)


def replay(
    call: RecordedCall,
    backend: str,
    *,
    target: str | DeviceSpec | None = None,
    plan: AnyPlan | None = None,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Run a recorded call through its operator.

    golden gets every float input widened to float64, which is exact, so that its results come back unrounded in
    float64. Other backends get the arrays as they were recorded. A pool is copied first.

    Returns:
        (out [T, Hv, Dv], final state [N, Hv, Dv, Dk]), or (out, the pool after the call [slots, Hv, Dv, Dk]).

    Raises:
        ContractError: The options are not the operator's; see `npu_chunk_gated_delta_rule` and
            `npu_recurrent_gated_delta_rule`.
    """
    arrays: dict[str, Any] = dict(call.arrays)
    if backend == "golden":
        arrays = {name: x.astype(FLOAT64) if x.dtype in KINDS else x for name, x in arrays.items()}
    options: dict[str, Any] = {"scale": call.scale, "backend": backend, "target": target, "plan": plan}
    options["threads"] = threads
    if call.operator != RECURRENT_OPERATOR:
        return npu_chunk_gated_delta_rule(**arrays, **options)
    pool = np.array(arrays.pop("state"))
    form = cast("Any", call.seq_lens_format)
    return npu_recurrent_gated_delta_rule(**arrays, state=pool, seq_lens_format=form, **options), pool


def plan_call(
    call: RecordedCall,
    target: str | DeviceSpec | None = None,
    v_step: int | None = None,
    *,
    backend: str = "faithful",
) -> AnyPlan:
    """Plan a recorded call for a device, as faithful or fast would run it.

    Raises:
        ContractError: The target, the V tile or the backend is not one; BudgetError: nothing fits.
        DtypeError: The call's query, key and value, or its pool, are float64.
        UnsupportedError: Calls over a pool have plans on faithful only.
    """
    problem = call.problem()
    if problem.q.dtype == FLOAT64:
        raise DtypeError(f"{call.source}: float64 query, key and value are golden's only, and have no plan")
    if not isinstance(problem, PoolProblem):
        return plan_chunk(
            problem.dims,
            problem.lengths,
            backend=cast("Any", backend),
            dtype=problem.q.dtype.name,
            target=target,
            v_step=v_step,
        )
    if problem.pool.dtype == FLOAT64:
        raise DtypeError(f"{call.source}: a float64 state is golden's only, and has no plan")
    if backend not in POOL_PLANNED:
        raise UnsupportedError(f"{call.source}: a call over a pool has a plan on faithful only, not on {backend}")
    gates = problem.gates
    return plan_step(
        problem.dims,
        problem.lengths,
        g=gates.has_g,
        gk=gates.gk,
        dtype=problem.q.dtype.name,
        state_dtype=problem.pool.dtype.name,
        target=target,
        v_step=v_step,
    )


def compare(call: RecordedCall, out: Array, state: Array) -> dict[str, Comparison]:
    """Compare a replay's results with what the call expects, by result name; empty where nothing was recorded.

    Outputs are compared by (sequence, head), final states too, a pool by (slot, head).
    """
    found, problem = {}, call.problem()
    if "out" in call.expected:
        starts = problem.sequences.start.tolist() if isinstance(problem, PoolProblem) else None
        found["out"] = compare_out(out, call.expected["out"], problem.lengths, starts)
    name = call.kind.state
    if name in call.expected:
        found[name] = compare_state(state, call.expected[name])
    return found
