"""The README says what is true: its example prints what stands below it."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_first_example_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(blocks("python")[0], str(README), "exec"), names)
    assert capsys.readouterr().out == blocks("text")[0]
    for block in blocks("python")[1:]:
        exec(compile(block, str(README), "exec"), names)


def test_first_screen_has_an_example_of_at_most_ten_statements() -> None:
    assert len(blocks("python")[0].splitlines()) <= 12
    assert README.read_text().index("```python") < 1500
