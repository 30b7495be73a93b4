"""`cgdr demo`: the shipped samples on every backend."""

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_table, print_text
from cgdr_numba.cli.report import announce_compiling, call_lines, plan_line, print_heads, time_line
from cgdr_numba.parity.calls import sample_call, sample_decode
from cgdr_numba.parity.runs import Run, run_call


def demo() -> None:
    """Run the shipped samples on every backend.

    They are a prefill, and a decode over a pool of states. The results are compared with the float64 results recorded
    beside them. Exits with 1 where an error is above its bound.
    """
    verdicts = []
    with errors_in_a_line():
        for call in (sample_call(), sample_decode()):
            print_text(call_lines(call))
            runs = []
            for backend in call.kind.backends:
                announce_compiling(call.operator, backend, call.has_channels)
                runs.append(run_call(call, backend))
                print_text(f"\n{backend}: {plan_line(runs[-1])}\n{time_line(runs[-1])}")
            print_text("\nrelative rms against the recorded float64 results\n")
            print_heads(runs)
            print_text()
            verdicts += [verdict for run in runs for verdict in _verdicts(run)]
    print_table(("", "worst", "at", "bound", ""), verdicts)
    if any(verdict[-1] != "ok" for verdict in verdicts):
        typer.echo("cgdr: an error is above its bound", err=True)
        raise typer.Exit(1)


def _verdicts(run: Run) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each result: its worst error beside the bound of its dtype."""
    return [
        (
            f"{run.backend} {name}",
            f"{found.worst:.3e}",
            str(found.worst_at),
            f"{run.bound(name):.0e}",
            "ok" if found.worst is not None and found.worst <= run.bound(name) else "ABOVE",
        )
        for name, found in run.errors.items()
    ]
