"""The lines and tables that `run` and `demo` share."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.cli.console import print_progress, print_table, print_text
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.core.pool_contract import PoolProblem
from cgdr_numba.parity.calls import RecordedCall
from cgdr_numba.parity.operators import RECURRENT_OPERATOR
from cgdr_numba.parity.runs import Run, will_compile
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import REVISION, Plan
from cgdr_numba.sched.pool_plan import POOL_REVISION, PoolPlan

_MOST_ROWS = 24
"""Rows of the table of (sequence, head); calls with more show the largest errors only."""


def call_lines(call: RecordedCall) -> str:
    """Return a call's name and sizes."""
    problem = call.problem()
    dims, lengths = problem.dims, problem.lengths
    shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
    scale = f"{call.scale:.9g}" if call.scale is not None else "1 (the operator's default)"
    if isinstance(problem, PoolProblem):
        states = f"pool of {len(problem.pool)} slots {problem.pool.dtype}"
    else:
        states = f"state {problem.state.dtype}"
    notes = [f"{name}: {call.metadata[name]}" for name in ("note", "cut") if name in call.metadata]
    sizes = (
        f"{dims.n_tokens} tokens in {dims.n_sequences} sequence(s) ({shown or 'none'}), Hk {dims.hk}, Hv {dims.hv}, "
        f"Dk {dims.dk}, Dv {dims.dv}, {problem.q.dtype}, {states}, scale {scale}"
    )
    return "\n".join([f"{call.source}: {call.operator}", *notes, sizes])


def plan_line(run: Run) -> str:
    """Return a run's plan in short."""
    plan = run.plan
    if isinstance(plan, HostPlan):
        return (
            f"width {plan.width}, {plan.n_v_tiles} V tile(s) a head, {plan.n_bins} bin(s) for {plan.n_threads} "
            f"thread(s), balance {plan.balance():.3f}, {plan.arena_bytes} bytes of scratch a bin\n"
            f"instruction set {instruction_set().name}"
        )
    if isinstance(plan, Plan):
        fill = f"{plan.n_bins} bin(s) on {plan.tiling.block_dim} of {plan.device.cores} cores"
        return _device_line(plan, fill, plan.tiling.ledger.total_bytes, REVISION)
    if isinstance(plan, PoolPlan):
        fill = f"output queues {plan.tiling.profile}, {plan.block_dim} of {plan.device.cores} cores"
        return _device_line(plan, fill, plan.ledger.total_bytes, POOL_REVISION)
    if run.backend == "golden":
        return "no plan: golden is a float64 token loop without a device"
    return f"no plan to show\ninstruction set {instruction_set().name}"


def _device_line(plan: Plan | PoolPlan, fill: str, ub_bytes: int, revision: str) -> str:
    """Return a plan for the NPU in short."""
    tiling, device = plan.tiling, plan.device
    extension = ", extension: the NPU takes float16 only" if plan.extension else ""
    return (
        f"{device.name}: v_step {tiling.v_step}, {tiling.n_v_tiles} V tile(s) a head, {fill}, "
        f"balance {plan.balance():.3f}, {ub_bytes} of {device.ub_bytes} bytes of UB\n{revision}{extension}"
    )


def announce_compiling(operator: str, backend: str, has_channels: bool = False) -> None:
    """Say before a backend's run that it will first compile; has_channels: for calls with a gate for every channel."""
    if will_compile(operator, backend, has_channels):
        print_progress(f"compiling the {backend} kernel: about 20 s the first time, then it is kept on disk ...")


def time_line(run: Run) -> str:
    """Return how long a run took, and apart from it how long its kernel took to get ready."""
    ready = ""
    if run.compile_seconds is not None:
        how = "to load the kernel from disk" if run.loaded else "to compile the kernel"
        ready = f" (before it, {run.compile_seconds:.2f} s {how})"
    return f"time {run.seconds:.4f} s{ready}"


def print_worst(run: Run) -> None:
    """Print a run's worst (sequence, head) and worst element, a line for each result."""
    rows = []
    for name, found in run.errors.items():
        worst, at = ("-", "-") if found.worst is None else (f"{found.worst:.3e}", str(found.worst_at))
        element = ("-", "-", "-", "-")
        if found.max_abs_at is not None:
            place = str(list(found.max_abs_at))
            element = (f"{found.max_abs:.3e}", place, f"{found.actual:.6g}", f"{found.expected:.6g}")
        rows.append((name, worst, at, *element))
    place = "(sequence or slot, head)" if run.call.operator == RECURRENT_OPERATOR else "(sequence, head)"
    columns = ("worst", "relative rms", place, "max abs", "element", "got", "expected")
    print_table(columns, rows)


def print_heads(runs: Sequence[Run]) -> None:
    """Print the relative rms of every (sequence, head), side by side for all runs of one call.

    Those of a pool follow by (slot, head).
    """
    call = runs[0].call
    tokens = [str(length) for length in call.problem().lengths]
    if call.operator != RECURRENT_OPERATOR:
        _print_places("sequence", {"tokens": tokens}, _errors(runs, ("out", "final_state")))
        return
    _print_places("sequence", {"tokens": tokens}, _errors(runs, ("out",)))
    pools = _errors(runs, ("state",))
    if pools:
        slots = call.arrays["ssm_state_indices"].tolist()
        written = ["yes" if slot in slots else "no" for slot in range(len(call.arrays["state"]))]
        print_text()
        _print_places("slot", {"written": written}, pools)


def _errors(runs: Sequence[Run], names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Return the relative rms [N, H] of some results of all runs, by the name of their column."""
    return {
        (f"{run.backend} {name}" if len(runs) > 1 else name): run.errors[name].relative_rms
        for run in runs
        for name in names
        if name in run.errors
    }


def _print_places(what: str, notes: dict[str, list[str]], errors: dict[str, NDArray[np.float64]]) -> None:
    """Print a table of (sequence or slot, head), the largest errors first where there are many places."""
    if not errors:
        return
    tables = np.array(list(errors.values()))
    places = list(np.ndindex(*tables.shape[1:]))
    if len(places) > _MOST_ROWS:
        largest = np.nan_to_num(tables, nan=-1.0).max(axis=0)
        places.sort(key=lambda place: -largest[place])
        print_text(f"The {_MOST_ROWS} largest of {len(places)} ({what}, head), by relative rms:")
    rows = [
        (
            str(n),
            *(values[n] for values in notes.values()),
            str(h),
            *("-" if np.isnan(table[n, h]) else f"{table[n, h]:.3e}" for table in tables),
        )
        for n, h in places[:_MOST_ROWS]
    ]
    print_table((what, *notes, "head", *errors), rows)
