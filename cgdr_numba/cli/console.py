"""What all commands print with: plain text, tables, JSON, errors in a line."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from cgdr_numba.errors import ContractError, UnsupportedError

_TABLE_WIDTH = 200
"""Wide enough that no table is cut or wrapped: a terminal that is narrower wraps whole lines, a file takes them."""


def print_text(text: str = "") -> None:
    """Print lines as they are."""
    typer.echo(text)


def print_progress(text: str) -> None:
    """Print what is about to take long, on standard error, so that results can be piped."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without lines: the first column to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=_TABLE_WIDTH, markup=False, emoji=False, highlight=False).print(table)


def print_json(value: object) -> None:
    """Print one JSON value in a line; floats that JSON has no number for become the texts "nan", "inf" and "-inf"."""
    typer.echo(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """Return `value` with its non-finite floats as texts."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextmanager
def errors_in_a_line(as_json: bool = False) -> Iterator[None]:
    """Turn what the package raises into ``cgdr: ...`` on standard error and exit code 1.

    A plan's ledger follows the line. With as_json standard output gets {"error": ...}, and "ledger" where there is one.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # typer's to handle: whoever read standard output has seen enough
    except (ContractError, UnsupportedError, OSError, MemoryError, OverflowError) as error:
        message = _message(error)
        text, _, ledger = message.partition("\n")
        if as_json:
            print_json({"error": text, "ledger": ledger.splitlines()} if ledger else {"error": text})
        typer.echo(f"cgdr: {message}", err=True)
        raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    """Return what an error says to a user."""
    if isinstance(error, (MemoryError, OverflowError)):
        return f"sizes are too large for this machine: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
