"""Running ``cgdr``: in this process, or in one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import cgdr_numba
from cgdr_numba.cli import app

ROOT = Path(cgdr_numba.__file__).parents[1]


class Answer:
    """What a command answered."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        """Run the command in this process."""
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        """Standard output as one JSON value, without the numbers that JSON has not."""
        assert self.out.count("\n") == 1

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


def cgdr(*arguments: object) -> Answer:
    """Run a command that is expected to succeed."""
    answer = Answer(arguments)
    assert answer.code == 0, answer.err
    return answer


def refused(*arguments: object) -> str:
    """Run a command that is expected to fail with one line on standard error, and return that line."""
    answer = Answer(arguments)
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err.startswith("cgdr: ")
    assert answer.err.count("\n") == 1
    return answer.err


def misused(*arguments: object) -> str:
    """Run a command whose usage is wrong, and return what it says about it, in one line."""
    answer = Answer(arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Usage: " in answer.err
    return " ".join(answer.err.split())


def run_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``cgdr`` in a process of its own, its streams no terminals."""
    command = [sys.executable, "-m", "cgdr_numba.cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
