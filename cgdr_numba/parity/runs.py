"""One replay with everything worth telling about it: its plan, its times, its results, its errors."""

import time
from dataclasses import dataclass
from typing import Any, Final

import numba

from cgdr_numba.core.cache import cache_folder
from cgdr_numba.core.entry import Entry
from cgdr_numba.core.faithful.pool_worker import walk_cores
from cgdr_numba.core.faithful.worker import walk_bins
from cgdr_numba.core.fast.channel_worker import walk_channels
from cgdr_numba.core.fast.chunk_worker import walk_chunks
from cgdr_numba.core.fast.pool_worker import walk_pool
from cgdr_numba.parity.calls import AnyPlan, Array, RecordedCall
from cgdr_numba.parity.metrics import Comparison, bound_of
from cgdr_numba.parity.operators import CHUNK_OPERATOR, RECURRENT_OPERATOR
from cgdr_numba.parity.replays import compare, is_planned, plan_call, replay
from cgdr_numba.sched.device import DeviceSpec

WORKERS: Final[dict[str, dict[str, Entry[Any]]]] = {
    CHUNK_OPERATOR: {
        "fast": walk_chunks,
        "faithful": walk_bins,
    },
    RECURRENT_OPERATOR: {
        "fast": walk_pool,
        "faithful": walk_cores,
    },
}
"""The workers of the backends that are compiled, by operator."""
CHANNEL_WORKER: Final[Entry[Any]] = walk_channels
"""What runs calls on fast that have a gate for every channel."""


def worker_of(operator: str, backend: str, has_channels: bool = False) -> Entry[Any] | None:
    """Return what runs an operator's calls, or those with a gate for every channel; None where nothing is compiled."""
    return CHANNEL_WORKER if has_channels and backend == "fast" else WORKERS[operator].get(backend)


def will_compile(operator: str, backend: str, has_channels: bool = False) -> bool:
    """Return whether the backend's next run has to compile: nothing in this process, nothing kept on disk."""
    worker = worker_of(operator, backend, has_channels)
    if worker is None or numba.config.DISABLE_JIT:
        return False
    if worker.compile_seconds is not None:
        return False
    folder = cache_folder()
    return folder is None or next(folder.glob(worker.kept_as), None) is None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A recorded call after it was run on a backend."""

    call: RecordedCall
    backend: str
    plan: AnyPlan | None
    """The plan by which it ran; None for golden, which has no device, and where a backend has none to show."""
    out: Array
    """[T, Hv, Dv]"""
    final_state: Array
    """[N, Hv, Dv, Dk]; for a pool its slots after the call, [slots, Hv, Dv, Dk]."""
    seconds: float
    """Wall time of the call alone: checks, scratch and kernel; without planning and compiling."""
    compile_seconds: float | None
    """Wall time that compiling the kernel, or loading it from the cache, took in this process; None for golden and
    where kernels run as plain Python."""
    loaded: bool
    """Whether those seconds went into loading from the cache."""
    errors: dict[str, Comparison]
    """Comparison with the recorded references by result name, as far as there are any."""

    def bound(self, name: str) -> float:
        """Return the largest relative rms that a result may have, by its dtype."""
        return bound_of({"out": self.out, self.call.kind.state: self.final_state}[name])


def run_call(call: RecordedCall, backend: str, target: str | DeviceSpec | None = None) -> Run:
    """Plan, compile, run and compare a recorded call.

    Raises:
        ContractError: The backend or the target is not one, or the target is given for golden.
        BudgetError: Nothing fits the target's unified buffer.
    """
    plan, compile_seconds, loaded = None, None, False
    if is_planned(call, backend):
        plan = plan_call(call, target, backend=backend)
    worker = worker_of(call.operator, backend, call.has_channels)
    if worker is not None:
        worker.compile()
        compile_seconds, loaded = worker.compile_seconds, worker.loaded
    begin = time.perf_counter()
    out, final_state = replay(call, backend, target=target if plan is None else None, plan=plan)
    seconds = time.perf_counter() - begin
    errors = compare(call, out, final_state)
    return Run(call, backend, plan, out, final_state, seconds, compile_seconds, loaded, errors)
