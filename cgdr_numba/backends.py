"""From a checked problem and the caller's options to results: which backend runs, by which plan."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba import parts
from cgdr_numba.core import golden, memory
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Problem
from cgdr_numba.core.dtypes import FLOAT32, FLOAT64, round_to
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.threads import current_threads, most_threads
from cgdr_numba.errors import DtypeError, UnsupportedError
from cgdr_numba.sched.device import host_cache_bytes, resolve
from cgdr_numba.sched.host_plan import HostKey, HostPlan, plan_host
from cgdr_numba.sched.plan import Plan, PlanKey, make_chunk_plan

Array = NDArray[Any]

BACKENDS: Final = ("fast", "golden", "faithful")
"""The backends of the chunked functions."""
RECURRENT_BACKENDS: Final = ("fast", "golden")
"""The backends of the recurrent function."""


class Options(NamedTuple):
    """How a checked problem is to be run, as the caller said it."""

    backend: object
    target: object
    plan: object
    threads: object
    overflow: object
    axpy: object


class RecurrentOptions(NamedTuple):
    """How a checked recurrent problem is to be run, as the caller said it."""

    backend: object
    threads: object
    out_state: object
    initial_state: object
    """The initial state as it came, which out_state may be."""


def run(problem: Problem, options: Options) -> tuple[Array, Array]:
    """Check the options, run the backend, and pass the states of empty sequences through.

    Returns out [B, T, Hv, Dv] and the final state seen as [N, Hv, Dv, Dk].
    """
    checks = Checks(problem.op)
    backend = checks.choice("backend", options.backend, BACKENDS)
    threads = check_threads(checks, options.threads)
    if backend != "faithful":
        _refuse_the_kernels(checks, options, backend)
    if backend == "golden":
        out, final_state = _results(problem, backend)
        golden.run(problem, out, final_state)
    elif backend == "fast":
        host_plan = _host_plan(checks, problem, options, threads)
        out, final_state = _results(problem, backend)
        parts.run_chunks(problem, host_plan, threads, out, final_state)
    else:
        plan, arith = _plan(checks, problem, options), _arith(checks, options)
        out, final_state = _results(problem, backend)
        parts.run_faithful(problem, plan, arith, threads, out, final_state)
    if 0 in problem.lengths:
        _pass_states_through(problem, final_state)
    return out, final_state


def _arith(checks: Checks, options: Options) -> Arith | None:
    """Return faithful's options of arithmetic after their check; None where all are the default."""
    switches = Arith(
        fused=checks.choice("axpy", options.axpy, ("two-roundings", "fused")) == "fused",
        saturate=checks.choice("overflow", options.overflow, ("ieee", "saturate")) == "saturate",
    )
    return switches if any(switches) else None


def _results(problem: Problem, backend: str) -> tuple[Array, Array]:
    """Return unwritten arrays for out [B, T, Hv, Dv] and the final state, seen as [N, Hv, Dv, Dk]."""
    dims = problem.dims
    dtype = problem.state_dtype
    if dtype is None:
        dtype = FLOAT64 if backend == "golden" and problem.q.dtype == FLOAT64 else FLOAT32
    out = memory.result(problem.v.shape, problem.q.dtype)
    if problem.state_v_first:
        return out, memory.empty((dims.n_sequences, dims.hv, dims.dv, dims.dk), dtype)
    return out, memory.empty((dims.n_sequences, dims.hv, dims.dk, dims.dv), dtype).swapaxes(2, 3)


def run_recurrent(problem: Problem, options: RecurrentOptions) -> tuple[Array, Array]:
    """Check the options and run the recurrent operator; returns out and the final state in the caller's layout."""
    checks = Checks(problem.op)
    if isinstance(options.backend, str) and options.backend == "faithful":
        raise UnsupportedError(f'{problem.op}: backend="faithful" is not offered; take "fast" or "golden"')
    backend = checks.choice("backend", options.backend, RECURRENT_BACKENDS)
    threads = check_threads(checks, options.threads)
    if backend == "golden":
        if options.out_state is not None:
            raise checks.error('`out_state` must be left out with backend="golden"')
        out, seen = _results(problem, backend)
        golden.run(problem, out, seen)
        state = seen if problem.state_v_first else seen.swapaxes(2, 3)
    else:
        if problem.q.dtype == FLOAT64:
            raise _float64_is_goldens(checks, options.backend)
        state = _final_state(checks, problem, options)
        out = memory.result(problem.v.shape, problem.q.dtype)
        parts.run_tokens(problem, threads or current_threads(), threads, out, state)
    if 0 in problem.lengths:
        _pass_states_through(problem, state if problem.state_v_first else state.swapaxes(2, 3))
    return out, state


def _final_state(checks: Checks, problem: Problem, options: RecurrentOptions) -> Array:
    """Return out_state after its checks, or a new array for the final state, in the caller's layout."""
    if options.out_state is not None:
        return check_out_state(checks, problem, options.out_state, options.initial_state, "out_state")
    return memory.empty(problem.given_state.shape, FLOAT32)


def check_out_state(checks: Checks, problem: Problem, value: object, initial_state: object, name: str) -> Array:
    """Return the array that final states go to after its checks; it may be the initial state itself."""
    axes = "N, Hv, Dv, Dk" if problem.state_v_first else "N, Hv, Dk, Dv"
    state = checks.array(name, value)
    checks.rank(name, state, axes)
    checks.shape(name, state, axes, problem.given_state.shape)
    if state.dtype != FLOAT32:
        raise DtypeError(f"{checks.op}: `{name}` must be float32, got {state.dtype}")
    if not state.flags.writeable:
        raise checks.error(f"`{name}` must be writable, got a read-only array")
    if state.size > 0 and state.shape[3] > 1 and state.strides[3] != 4:
        raise checks.error(f"`{name}` must have adjacent elements on its last axis, got a stride of {state.strides[3]}")
    if not state.flags.c_contiguous and 0 in state.strides and state.size:
        raise checks.error(f"`{name}` must not overlap itself, got strides {list(state.strides)}")
    inputs: dict[str, Array | None] = {"q": problem.q, "k": problem.k, "v": problem.v, "g": problem.g}
    inputs |= {problem.gk_name: problem.gk, "gv": problem.gv, "beta": problem.beta}
    raw = problem.raw_gates
    if raw is not None:
        inputs |= raw.tensors()
    if initial_state is None or not _same_memory(state, initial_state):
        inputs["initial_state"] = problem.state
    for other, array in inputs.items():
        if array is not None and np.may_share_memory(state, array) and np.shares_memory(state, array):
            raise checks.error(
                f"`{name}` must be initial_state itself or share no memory with inputs, got some of `{other}`"
            )
    return state


def _same_memory(a: Array, b: Any) -> bool:
    """Return whether two arrays are the same elements in the same places."""
    return a is b or bool(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.strides == b.strides
        and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
    )


def _pass_states_through(problem: Problem, final_state: Array) -> None:
    """Copy the states of sequences without tokens; final_state is seen as [N, Hv, Dv, Dk]."""
    for n in np.flatnonzero(problem.sequences.length == 0):
        final_state[n] = round_to(problem.state[n].astype(FLOAT64), final_state.dtype)


def _float64_is_goldens(checks: Checks, backend: object) -> DtypeError:
    """Return the error for float64 tensors on other backends."""
    return DtypeError(
        f"{checks.op}: float64 q, k and v are golden's only, and `backend` is {backend!r}: "
        "cast them, for example q.astype(np.float32)"
    )


def check_threads(checks: Checks, value: object) -> int | None:
    """Return the number of threads after its check."""
    if value is None:
        return None
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise DtypeError(f"{checks.op}: `threads` must be an integer or None, got {value!r}")
    if not 1 <= value <= most_threads():
        raise checks.error(f"`threads` must be from 1 to numba's {most_threads()} threads, got {value}")
    return int(value)


def _plan(checks: Checks, problem: Problem, options: Options) -> Plan:
    """Return the caller's plan after its check, or a new one for the target."""
    if problem.q.dtype == FLOAT64:
        raise _float64_is_goldens(checks, options.backend)
    key = PlanKey(problem.dims, problem.lengths, problem.q.dtype.name)
    if options.plan is None:
        return make_chunk_plan(checks.op, *key[:2], dtype=key.dtype, target=options.target)
    if not isinstance(options.plan, Plan):
        raise DtypeError(f"{checks.op}: `plan` must be a Plan or None, got {type(options.plan).__qualname__}")
    _check_plan(checks, options, key)
    return options.plan


def _host_plan(checks: Checks, problem: Problem, options: Options, threads: int | None) -> HostPlan:
    """Return the caller's plan for fast after its check, or the one for the target and threads."""
    if problem.q.dtype == FLOAT64:
        raise _float64_is_goldens(checks, options.backend)
    if options.plan is None:
        if options.target is None:
            return plan_host(problem.dims, problem.lengths, threads or current_threads(), host_cache_bytes())
        device = resolve(options.target, "host", checks.op)
        return plan_host(problem.dims, problem.lengths, device.cores, device.ub_bytes)
    if not isinstance(options.plan, HostPlan):
        raise DtypeError(f"{checks.op}: `plan` must be a HostPlan or None, got {type(options.plan).__qualname__}")
    _check_plan(checks, options, HostKey(problem.dims, problem.lengths))
    return options.plan


def _check_plan(checks: Checks, options: Options, key: PlanKey | HostKey) -> None:
    """Raise for a plan beside what it excludes, or one that was made for another call."""
    for name, value in (("target", options.target), ("threads", options.threads)):
        if value is not None:
            raise checks.error(f"`plan` excludes `{name}`, got {name} = {value!r} beside it")
    made_for = getattr(options.plan, "key", None)
    if made_for != key:
        raise checks.error(f"`plan` must be made for {key}, got one for {made_for}")


def _refuse_the_kernels(checks: Checks, options: Options, backend: str) -> None:
    """Raise for options that only faithful has, and for a device with golden."""
    defaults: dict[str, str | None] = {"axpy": "two-roundings", "overflow": "ieee"}
    reason = "has no options of the kernel's arithmetic"
    if backend == "golden":
        defaults, reason = {"target": None, "plan": None, **defaults}, "has no device"
    for name, default in defaults.items():
        value = getattr(options, name)
        if value is not default and not (isinstance(value, str) and value == default):
            key = getattr(value, "key", None)
            shown = f"{value!r} ({type(value).__qualname__})" if key is None else f"one for {key}"
            raise checks.error(f'`{name}` must be left out with backend="{backend}", which {reason}, got {shown}')
