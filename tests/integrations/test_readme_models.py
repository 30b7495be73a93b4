"""The README's section on models says what is true: its example runs as written, and prints what stands below it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tiny_models")

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "README.md").read_text().split("\n## Models\n")[1].split("\n## ")[0]

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


def without_versions(text: str) -> str:
    """The text with the version of transformers and the route, which differ between environments, left out."""
    return re.sub(r"\(transformers [\d.]+, route \w+\)", "(...)", text)


def test_example_prints_its_output() -> None:
    result = subprocess.run(
        [sys.executable, "-c", blocks("py")[0]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert without_versions(result.stdout) == without_versions(blocks("text")[0])


def test_command_prints_its_output() -> None:
    """The text and the verdict are those of the README; the times are the machine's."""
    command = blocks("sh")[-1].replace("\\\n", " ").strip()
    assert command.startswith("cgdr generate tests/data/tiny_qwen3_5 ")
    arguments = [sys.executable, "-m", "cgdr_numba.cli"]
    result = subprocess.run(
        " ".join([*arguments, command.removeprefix("cgdr")]),
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    shown = blocks("text")[1]
    assert result.stdout.split("operator by")[0] == shown.split("operator by")[0]
    assert result.stdout.splitlines()[-1] == shown.splitlines()[-1]
