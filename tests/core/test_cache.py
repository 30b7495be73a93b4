"""Compiled code on disk: one folder for every state of the sources, and calls that go on where it cannot be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgdr_numba.core import cache

SCRIPT = """
import numpy as np
from cgdr_numba.core.jit import Compiled
from numba.core import types

def double(x):
    x[0] = 2 * x[0]

entry = Compiled(double, lambda: (types.Array(types.float32, 1, "C"),))
x = np.ones(1, np.float32)
entry(x)
print(x[0], len(entry._call.stats.cache_hits))
"""


def run(folder: str, **settings: str) -> tuple[str, str]:
    """Results of the script in a new process: what it printed, and warnings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {**inherited, cache.FOLDER_VARIABLE: folder, **settings}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    assert run(str(tmp_path)) == ("2.0 0", "")
    assert run(str(tmp_path)) == ("2.0 1", "")
    assert run(str(tmp_path), NUMBA_BOUNDSCHECK="1") == ("2.0 0", ""), "other settings, other code"
    for suffix in ("nbi", "nbc"):
        for path in tmp_path.rglob(f"*.{suffix}"):
            path.write_bytes(b"")
        assert run(str(tmp_path)) == ("2.0 0", ""), f"damaged .{suffix}"
        assert run(str(tmp_path)) == ("2.0 1", ""), f"repaired .{suffix}"


@pytest.mark.slow
def test_no_folder_no_cache(tmp_path: Path) -> None:
    assert run("") == ("2.0 0", "")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    printed, warning = run(str(blocked))
    assert printed == "2.0 0"
    assert cache.FOLDER_VARIABLE in warning


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    assert cache.cache_folder() == tmp_path / cache.sources_hash()
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "")
    assert cache.cache_folder() is None
    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "cgdr_numba" / cache.sources_hash()
