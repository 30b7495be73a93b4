"""The command line: parse, call, print. What is computed lives in parity/ and sched/."""

from typing import Annotated

import typer

import cgdr_numba
from cgdr_numba.cli import demo, info, models, plan, run, warmup

app = typer.Typer(
    name="cgdr",
    help="The Gated Delta Rule on CPUs: replay recorded calls, show plans of the Ascend 310P kernel.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(run.run)
app.command()(plan.plan)
app.command()(info.info)
app.command()(warmup.warmup)
app.command()(models.generate)
app.command()(models.record)


def _print_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        typer.echo(f"cgdr {cgdr_numba.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The Gated Delta Rule on CPUs: replay recorded calls, show plans of the Ascend 310P kernel."""


def main() -> None:
    """Run the command line of this process's arguments."""
    app(prog_name="cgdr")
