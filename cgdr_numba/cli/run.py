"""`cgdr run`: replay one recorded call."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_json, print_text
from cgdr_numba.cli.report import announce_compiling, call_lines, plan_line, print_heads, print_worst, time_line
from cgdr_numba.parity.calls import check_output, load_call, save_results
from cgdr_numba.parity.runs import Run, run_call
from cgdr_numba.sched.plan import REVISION, Plan
from cgdr_numba.sched.pool_plan import POOL_REVISION, PoolPlan


def run(
    call: Annotated[Path, typer.Argument(metavar="CALL", help="Recorded call, .safetensors or .npz.")],
    backend: Annotated[str, typer.Option(help="fast, golden or faithful.")] = "faithful",
    target: Annotated[
        str | None,
        typer.Option(
            help="Device to plan for: 310p (default of faithful) or host (default of fast).", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Write the results as .safetensors."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False,
) -> None:
    """Replay a recorded call and compare the results.

    Prints the sizes, the plan, the time, and the relative rms errors against expected_out and expected_final_state
    (expected_state of a pool) where the file holds them.
    """
    with errors_in_a_line(as_json):
        recorded = load_call(call)
        if output is not None:
            check_output(output, recorded)
        announce_compiling(recorded.operator, backend, recorded.has_channels)
        result = run_call(recorded, backend, target)
        if output is not None:
            save_results(output, recorded, (result.out, result.final_state), result.plan or backend)
    if as_json:
        print_json(_as_dict(result, output))
    else:
        _print(result, output)


def _print(result: Run, output: Path | None) -> None:
    """Print a run for people."""
    print_text(f"{call_lines(result.call)}\n\n{result.backend}: {plan_line(result)}\n{time_line(result)}\n")
    if result.errors:
        print_worst(result)
        print_text()
        print_heads([result])
    else:
        print_text("nothing to compare with: the file holds no references (expected_...)")
    if output is not None:
        print_text(
            f"\nwrote {output}: out {list(result.out.shape)}, {result.call.kind.state} {list(result.final_state.shape)}"
        )


def _as_dict(result: Run, output: Path | None) -> dict[str, Any]:
    """Return a run as plain values."""
    problem = result.call.problem()
    return {
        "call": result.call.source,
        "operator": result.call.operator,
        "backend": result.backend,
        "revision": _revision(result),
        "dims": problem.dims._asdict(),
        "lengths": problem.lengths,
        "dtype": problem.q.dtype.name,
        "scale": problem.scale,
        "plan": None if result.plan is None else result.plan.as_dict(),
        "seconds": result.seconds,
        "compile_seconds": result.compile_seconds,
        "errors": {name: found.as_dict() for name, found in result.errors.items()},
        "output": None if output is None else str(output),
    }


def _revision(result: Run) -> str | None:
    """Return the kernel that a run re-enacted; None where it was none of the NPU's."""
    if isinstance(result.plan, PoolPlan):
        return POOL_REVISION
    return REVISION if isinstance(result.plan, Plan) else None
