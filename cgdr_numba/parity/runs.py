"""One replay with everything worth telling about it: its plan, its times, its results, its errors."""

import time
from dataclasses import dataclass

import numba

from cgdr_numba.core.cache import cache_folder
from cgdr_numba.core.faithful.worker import walk_bins
from cgdr_numba.parity.calls import Array, RecordedCall, compare, plan_call, replay
from cgdr_numba.parity.metrics import Comparison
from cgdr_numba.sched.device import DeviceSpec
from cgdr_numba.sched.plan import Plan


def will_compile() -> bool:
    """Return whether the next faithful run has to compile: nothing in this process, nothing kept on disk."""
    if numba.config.DISABLE_JIT or walk_bins.compile_seconds is not None:
        return False
    folder = cache_folder()
    return folder is None or next(folder.glob("*.nbi"), None) is None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A recorded call after it was run on a backend."""

    call: RecordedCall
    backend: str
    plan: Plan | None
    """Faithful's plan; None for golden, which has no device."""
    out: Array
    """[T, Hv, Dv]"""
    final_state: Array
    """[N, Hv, Dv, Dk]"""
    seconds: float
    """Wall time of the call alone: checks, scratch and kernel; without planning and compiling."""
    compile_seconds: float | None
    """Wall time that compiling the kernel, or loading it from the cache, took in this process; None for golden and
    where kernels run as plain Python."""
    loaded: bool
    """Whether those seconds went into loading from the cache."""
    errors: dict[str, Comparison]
    """Comparison with the recorded references by result name, as far as there are any."""


def run_call(call: RecordedCall, backend: str, target: str | DeviceSpec | None = None) -> Run:
    """Plan, compile, run and compare a recorded call.

    Raises:
        ContractError: The backend or the target is not one, or the target is given for golden.
        BudgetError: Nothing fits the target's unified buffer.
    """
    plan, compile_seconds = None, None
    if backend == "faithful":
        plan = plan_call(call, target)
        walk_bins.compile()
        compile_seconds = walk_bins.compile_seconds
    begin = time.perf_counter()
    out, final_state = replay(call, backend, target=target if plan is None else None, plan=plan)
    seconds = time.perf_counter() - begin
    errors = compare(call, out, final_state)
    return Run(call, backend, plan, out, final_state, seconds, compile_seconds, walk_bins.loaded, errors)
