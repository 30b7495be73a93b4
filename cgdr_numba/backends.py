"""From a checked problem and the caller's options to results: which backend runs, by which plan."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import golden, memory
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import ChunkProblem
from cgdr_numba.core.dtypes import FLOAT32, FLOAT64, round_to
from cgdr_numba.core.faithful import launch
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.threads import most_threads
from cgdr_numba.errors import DtypeError, UnsupportedError
from cgdr_numba.sched.plan import Plan, PlanKey, make_chunk_plan

Array = NDArray[Any]

BACKENDS: Final = ("golden", "faithful")
"""The backends of this version."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a checked problem is to be run, as the caller said it."""

    backend: object
    target: object
    plan: object
    threads: object
    overflow: object
    axpy: object


def run(problem: ChunkProblem, options: Options) -> tuple[Array, Array]:
    """Check the options, run the backend, and pass the states of empty sequences through.

    Returns out [B, T, Hv, Dv] and the final state seen as [N, Hv, Dv, Dk].
    """
    checks = Checks(problem.op)
    if isinstance(options.backend, str) and options.backend == "fast":
        raise UnsupportedError(f'{problem.op}: backend="fast" is not offered yet; take "golden" or "faithful"')
    backend = checks.choice("backend", options.backend, BACKENDS)
    switches = Arith(
        fused=checks.choice("axpy", options.axpy, ("two-roundings", "fused")) == "fused",
        saturate=checks.choice("overflow", options.overflow, ("ieee", "saturate")) == "saturate",
    )
    arith = switches if any(switches) else None
    threads = _threads(checks, options.threads)
    plan = _plan(checks, problem, options) if backend == "faithful" else None
    if plan is None:
        _refuse_for_golden(checks, options)
    out, final_state = _results(problem, backend)
    if plan is None:
        golden.run(problem, out, final_state)
    else:
        launch.run(problem, plan, arith, threads, out, final_state)
    for n in np.flatnonzero(problem.sequences.length == 0):
        final_state[n] = round_to(problem.state[n].astype(FLOAT64), final_state.dtype)
    return out, final_state


def _results(problem: ChunkProblem, backend: str) -> tuple[Array, Array]:
    """Return unwritten arrays for out [B, T, Hv, Dv] and the final state, seen as [N, Hv, Dv, Dk]."""
    dims = problem.dims
    dtype = problem.state_dtype
    if dtype is None:
        dtype = FLOAT64 if backend == "golden" and problem.q.dtype == FLOAT64 else FLOAT32
    out = memory.empty((*problem.v.shape[:2], dims.hv, dims.dv), problem.q.dtype)
    if problem.state_v_first:
        return out, memory.empty((dims.n_sequences, dims.hv, dims.dv, dims.dk), dtype)
    return out, memory.empty((dims.n_sequences, dims.hv, dims.dk, dims.dv), dtype).swapaxes(2, 3)


def _threads(checks: Checks, value: object) -> int | None:
    """Return the number of threads after its check."""
    if value is None:
        return None
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise DtypeError(f"{checks.op}: `threads` must be an integer or None, got {value!r}")
    if not 1 <= value <= most_threads():
        raise checks.error(f"`threads` must be from 1 to numba's {most_threads()} threads, got {value}")
    return int(value)


def _plan(checks: Checks, problem: ChunkProblem, options: Options) -> Plan:
    """Return the caller's plan after its check, or a new one for the target."""
    if problem.q.dtype == FLOAT64:
        raise DtypeError(
            f"{checks.op}: float64 q, k and v are golden's only, and `backend` is {options.backend!r}: "
            "cast them, for example q.astype(np.float32)"
        )
    key = PlanKey(problem.dims, problem.lengths, problem.q.dtype.name)
    plan = options.plan
    if plan is None:
        return make_chunk_plan(checks.op, *key[:2], dtype=key.dtype, target=options.target)
    if not isinstance(plan, Plan):
        raise DtypeError(f"{checks.op}: `plan` must be a Plan or None, got {type(plan).__qualname__}")
    for name, value in (("target", options.target), ("threads", options.threads)):
        if value is not None:
            raise checks.error(f"`plan` excludes `{name}`, got {name} = {value!r} beside it")
    if plan.key != key:
        raise checks.error(f"`plan` must be made for {key}, got one for {plan.key}")
    return plan


def _refuse_for_golden(checks: Checks, options: Options) -> None:
    """Raise for options that only other backends have."""
    defaults = {"target": None, "plan": None, "axpy": "two-roundings", "overflow": "ieee"}
    for name, default in defaults.items():
        value = getattr(options, name)
        if value is not default and not (isinstance(value, str) and value == default):
            shown = f"one for {value.key}" if isinstance(value, Plan) else f"{value!r} ({type(value).__qualname__})"
            raise checks.error(f'`{name}` must be left out with backend="golden", which has no device, got {shown}')
