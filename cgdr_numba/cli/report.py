"""The lines and tables that `run` and `demo` share."""

from collections.abc import Sequence

import numpy as np

from cgdr_numba.cli.console import print_progress, print_table, print_text
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.parity.calls import AnyPlan, RecordedCall
from cgdr_numba.parity.runs import Run, will_compile
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import REVISION

_MOST_ROWS = 24
"""Rows of the table of (sequence, head); calls with more show the largest errors only."""


def call_lines(call: RecordedCall) -> str:
    """Return a call's name and sizes."""
    problem = call.problem()
    dims, lengths = problem.dims, problem.lengths
    shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
    scale = f"{call.scale:.9g}" if call.scale is not None else "1 (the operator's default)"
    notes = [f"{name}: {call.metadata[name]}" for name in ("note", "cut") if name in call.metadata]
    sizes = (
        f"{dims.n_tokens} tokens in {dims.n_sequences} sequence(s) ({shown or 'none'}), Hk {dims.hk}, Hv {dims.hv}, "
        f"Dk {dims.dk}, Dv {dims.dv}, {problem.q.dtype}, state {problem.state.dtype}, scale {scale}"
    )
    return "\n".join([f"{call.source}: {call.operator}", *notes, sizes])


def plan_line(plan: AnyPlan | None) -> str:
    """Return a plan in short."""
    if plan is None:
        return "no plan: golden is a float64 token loop without a device"
    if isinstance(plan, HostPlan):
        return (
            f"width {plan.width}, {plan.n_v_tiles} V tile(s) a head, {plan.n_bins} bin(s) for {plan.n_threads} "
            f"thread(s), balance {plan.balance():.3f}, {plan.arena_bytes} bytes of scratch a bin\n"
            f"instruction set {instruction_set().name}"
        )
    tiling, device = plan.tiling, plan.device
    extension = ", extension: the NPU takes float16 only" if plan.extension else ""
    return (
        f"{device.name}: v_step {tiling.v_step}, {tiling.n_v_tiles} V tile(s) a head, {plan.n_bins} bin(s) on "
        f"{tiling.block_dim} of {device.cores} cores, balance {plan.balance():.3f}, "
        f"{tiling.ledger.total_bytes} of {device.ub_bytes} bytes of UB\n"
        f"{REVISION}{extension}"
    )


def announce_compiling(backend: str) -> None:
    """Say before a backend's run that it will first compile."""
    if will_compile(backend):
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
    columns = ("worst", "relative rms", "(sequence, head)", "max abs", "element", "got", "expected")
    print_table(columns, rows)


def print_heads(runs: Sequence[Run]) -> None:
    """Print the relative rms of every (sequence, head), side by side for all runs of one call."""
    call = runs[0].call
    lengths = call.arrays["actual_seq_lengths"].tolist()
    errors = {
        (f"{run.backend} {name}" if len(runs) > 1 else name): found.relative_rms
        for run in runs
        for name, found in run.errors.items()
    }
    tables = np.array(list(errors.values()))
    places = list(np.ndindex(*tables.shape[1:]))
    if len(places) > _MOST_ROWS:
        largest = np.nan_to_num(tables, nan=-1.0).max(axis=0)
        places.sort(key=lambda place: -largest[place])
        print_text(f"The {_MOST_ROWS} largest of {len(places)} (sequence, head), by relative rms:")
    rows = [
        (str(n), str(lengths[n]), str(h), *("-" if np.isnan(table[n, h]) else f"{table[n, h]:.3e}" for table in tables))
        for n, h in places[:_MOST_ROWS]
    ]
    print_table(("sequence", "tokens", "head", *errors), rows)
