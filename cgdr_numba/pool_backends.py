"""From a checked problem over a pool and the caller's options to results: which backend runs, by which plan."""

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from cgdr_numba.backends import check_threads
from cgdr_numba.core import golden_pool, memory
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dtypes import FLOAT64
from cgdr_numba.core.faithful import pool_launch
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.fast import pool_launch as fast
from cgdr_numba.core.pool_contract import POOL_NAMES, PoolProblem
from cgdr_numba.core.threads import current_threads
from cgdr_numba.errors import DtypeError
from cgdr_numba.sched.channels import plan_channels
from cgdr_numba.sched.device import host_cache_bytes
from cgdr_numba.sched.pool_plan import PoolKey, PoolPlan, check_step_lengths, make_pool_plan
from cgdr_numba.sched.steps import plan_steps

Array = NDArray[Any]

POOL_BACKENDS: Final = ("faithful", "fast", "golden")
"""The backends of the recurrent function over a pool."""


class PoolOptions(NamedTuple):
    """How a checked problem is to be run, as the caller said it."""

    backend: object
    target: object
    plan: object
    threads: object
    overflow: object


def run_pool(problem: PoolProblem, options: PoolOptions) -> Array:
    """Check the options and run the backend: the pool is updated in place. Returns out [T, Hv, Dv]."""
    checks = Checks(problem.op)
    backend = checks.choice("backend", options.backend, POOL_BACKENDS)
    threads = check_threads(checks, options.threads)
    if backend == "golden":
        _refuse(checks, options, backend)
        out = _result(problem)
        golden_pool.run(problem, out)
        return out
    _refuse_float64(checks, problem, backend)
    if backend == "fast":
        _refuse(checks, options, backend)
        out = _result(problem)
        _run_fast(problem, threads, out)
        return out
    saturates = checks.choice("overflow", options.overflow, ("ieee", "saturate")) == "saturate"
    plan = _plan(checks, problem, options)
    out = _result(problem)
    pool_launch.run(problem, plan, Arith(fused=False, saturate=True) if saturates else None, threads, out)
    return out


def _run_fast(problem: PoolProblem, threads: int | None, out: Array) -> None:
    """Run on fast, on as many threads as there are."""
    n_bins = threads or current_threads()
    if problem.gates.gk == "vector":
        channel_plan = plan_channels(problem.dims, problem.lengths, n_bins, host_cache_bytes())
        fast.run_pool_channels(problem, channel_plan, threads, out)
    else:
        fast.run_pool(problem, plan_steps(problem.dims, problem.lengths, n_bins), threads, out)


def _result(problem: PoolProblem) -> Array:
    """Return an array for out, unwritten but for padding rows."""
    out = memory.result(problem.v.shape, problem.q.dtype)
    if len(problem.padding):
        out[problem.padding] = 0
    return out


def _refuse(checks: Checks, options: PoolOptions, backend: str) -> None:
    """Raise for options that only faithful has."""
    reason = "has no device" if backend == "golden" else "plans for its threads"
    defaults = {"target": None, "plan": None, "overflow": "ieee"}
    for name, default in defaults.items():
        value = getattr(options, name)
        if value is not default and not (isinstance(value, str) and value == default):
            key = getattr(value, "key", None)
            shown = f"{value!r}" if key is None else f"one for {key}"
            raise checks.error(f'`{name}` must be left out with backend="{backend}", which {reason}, got {shown}')


def _refuse_float64(checks: Checks, problem: PoolProblem, backend: str) -> None:
    """Raise for float64 tensors and pools, which golden alone computes with."""
    for name, array in ((POOL_NAMES.q, problem.q), (POOL_NAMES.state, problem.pool)):
        if array.dtype == FLOAT64:
            raise DtypeError(
                f"{checks.op}: a float64 `{name}` is golden's only, and `backend` is {backend!r}: cast it, for example "
                f"{name}.astype(np.float32)"
            )


def _plan(checks: Checks, problem: PoolProblem, options: PoolOptions) -> PoolPlan:
    """Return the caller's plan after its check, or a new one for the target; one that fits the UB."""
    check_step_lengths(checks, POOL_NAMES.lengths, problem.lengths)
    key = PoolKey(problem.dims, problem.lengths, problem.gates, problem.q.dtype.name, problem.pool.dtype.name)
    plan = options.plan
    if plan is None:
        plan = make_pool_plan(checks.op, key, target=options.target)
    elif not isinstance(plan, PoolPlan):
        raise DtypeError(f"{checks.op}: `plan` must be a PoolPlan or None, got {type(plan).__qualname__}")
    else:
        for name, value in (("target", options.target), ("threads", options.threads)):
            if value is not None:
                raise checks.error(f"`plan` excludes `{name}`, got {name} = {value!r} beside it")
        if plan.key != key:
            raise checks.error(f"`plan` must be made for {key}, got one for {plan.key}")
    plan.check_fits(checks.op)
    return plan
