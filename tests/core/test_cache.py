"""Compiled code on disk: never stale, never half written, and calls that go on where it cannot be used."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cgdr_numba
from cgdr_numba.core import cache

SCRIPT = """
import sys, time
import numpy as np
from cgdr_numba.core.jit import Compiled
from numba.core import types

def double(x):
    x[0] = 2 * x[0]

def triple(x):
    x[0] = 3 * x[0]

kernels = [Compiled(f, lambda: (types.Array(types.float32, 1, "C"),)) for f in (double, triple)]
while len(sys.argv) > 1 and time.time() < float(sys.argv[1]):
    pass
results = []
for kernel in kernels:
    x = np.ones(1, np.float32)
    kernel(x)
    results += [float(x[0]), len(kernel._call.stats.cache_hits)]
print(*results)
"""
COMPILED, LOADED = ("2.0 0 3.0 0", ""), ("2.0 1 3.0 1", "")
PACKAGE = Path(cgdr_numba.__file__).parent


def start(code: str, settings: dict[str, str], *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A new process that runs the code, with no settings of numba but these."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    inherited.pop(cache.FOLDER_VARIABLE, None)
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**inherited, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **settings}
    command = [sys.executable, "-P", "-W", "always", "-c", code, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process printed, and its warnings."""
    printed, warned = process.communicate(timeout=300)
    assert process.returncode == 0, warned[-2000:]
    return printed.strip(), warned


def run(folder: Path | str, **settings: str) -> tuple[str, str]:
    """Results of the script in a new process with the cache in `folder`."""
    return end(start(SCRIPT, {cache.FOLDER_VARIABLE: str(folder), **settings}))


def drop_rights() -> None:
    """Let file modes bind this process even where it is root's: no CAP_DAC_OVERRIDE, no CAP_DAC_READ_SEARCH."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def run_without_rights(settings: dict[str, str], code: str = SCRIPT) -> tuple[str, str]:
    """Results of a new process that file modes bind."""
    return end(start(code, settings, preexec_fn=drop_rights))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may write into."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    try:
        probe = run_without_rights({}, f"import os; print(os.access({str(folder)!r}, os.W_OK))")
        if probe[0] != "False":
            pytest.skip("file modes bind no process here")
        yield folder
    finally:
        folder.chmod(0o755)


def assert_serves_with_one_warning(found: tuple[str, str], place: str) -> None:
    """Both kernels compiled, with one warning that names the place and the variable."""
    printed, warned = found
    assert printed == COMPILED[0]
    assert warned.count("RuntimeWarning") == 1
    assert f"no compiled code can be kept {place}" in warned
    assert cache.FOLDER_VARIABLE in warned


@pytest.mark.slow
def test_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    assert run(tmp_path) == COMPILED
    assert run(tmp_path) == LOADED
    assert run(tmp_path, NUMBA_BOUNDSCHECK="1") == COMPILED, "other settings, other code"
    assert run(tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == COMPILED, "another processor"
    assert len(list(tmp_path.iterdir())) == 3


def damages(content: bytes) -> dict[str, bytes]:
    """Ways to spoil a file."""
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    return {
        "empty": b"",
        "half": content[:middle],
        "one bit flipped": content[:middle] + flipped + content[middle + 1 :],
        "garbage": os.urandom(len(content)),
    }


@pytest.mark.slow
def test_t109_damaged_files_are_compiled_anew(tmp_path: Path) -> None:
    run(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    whole = [path.read_bytes() for path in files]
    for how in damages(whole[0]):
        for path, content in zip(files, whole, strict=True):
            path.write_bytes(damages(content)[how])
        assert run(tmp_path) == COMPILED, how
    assert run(tmp_path) == LOADED, "every file was written anew"


@pytest.mark.slow
def test_t109_a_folder_in_a_file_s_place_is_survived(tmp_path: Path) -> None:
    run(tmp_path)
    for path in list(tmp_path.rglob("*.nbc")):
        path.unlink()
        path.mkdir()
    assert_serves_with_one_warning(run(tmp_path), f"in {tmp_path}")


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [False, True])
def test_t110_eight_processes_start_cold_at_once(tmp_path: Path, spoiled: bool) -> None:
    """On an empty folder, and on one with damaged files; nothing but whole files is left."""
    if spoiled:
        run(tmp_path)
        for path in tmp_path.rglob("*.nbc"):
            path.write_bytes(b"")
    together = str(time.time() + 2)
    settings = {cache.FOLDER_VARIABLE: str(tmp_path)}
    processes = [start(SCRIPT, settings, together) for _ in range(8)]
    for printed, warned in map(end, processes):
        assert printed.split()[::2] == ["2.0", "3.0"]
        assert warned == ""
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".nbc", ".nbc"]
    assert run(tmp_path) == LOADED


@pytest.mark.slow
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert run("") == COMPILED, "turned off, so no warning"
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert_serves_with_one_warning(run(blocked), f"in {blocked}")


@pytest.mark.slow
def test_a_cache_folder_without_write_permission(locked: Path) -> None:
    assert_serves_with_one_warning(run_without_rights({cache.FOLDER_VARIABLE: str(locked)}), f"in {locked}")


@pytest.mark.slow
def test_a_home_without_write_permission(locked: Path) -> None:
    settings = {"HOME": str(locked), "XDG_CACHE_HOME": ""}
    assert_serves_with_one_warning(run_without_rights(settings), f"in {locked}/.cache/cgdr_numba")


@pytest.mark.slow
def test_a_filled_cache_needs_no_write_permission(tmp_path: Path, locked: Path) -> None:
    locked.chmod(0o755)
    assert run(locked) == COMPILED
    folders = [path for path in (locked, *locked.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    assert run_without_rights({cache.FOLDER_VARIABLE: str(locked)}) == LOADED
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.slow
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """Files may not grow beyond a kilobyte here, so writing ends in an error as on a full disk."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    found = end(start(limit + SCRIPT, {cache.FOLDER_VARIABLE: str(tmp_path)}))
    assert_serves_with_one_warning(found, f"in {tmp_path}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


GATES = """
import numpy as np
from cgdr_numba import fused_gdn_gating
from cgdr_numba.core.gates import walk_gates
one = np.ones((1, 1, 1), np.float32)
g, beta = fused_gdn_gating(np.zeros(1, np.float32), one, one, None)
print(beta.item(), walk_gates.loaded)
"""
EDIT = "\n\ndef exp64(x: float) -> float:\n    return 3.0 + 0.0 * x\n"
"""A helper of another module than the kernel's, which makes sigmoids of positive numbers 1 / (1 + 3)."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package."""
    shutil.copytree(PACKAGE, tmp_path / "site" / "cgdr_numba", ignore=shutil.ignore_patterns("__pycache__", "data"))
    return tmp_path / "site"


@pytest.mark.slow
def test_an_edited_helper_module_compiles_anew(tmp_path: Path, package: Path) -> None:
    settings = {cache.FOLDER_VARIABLE: str(tmp_path / "kernels"), "PYTHONPATH": str(package)}
    first, _ = end(start(GATES, settings))
    assert first.startswith("0.73105")
    assert first.endswith("False")
    assert end(start(GATES, settings))[0] == first.replace("False", "True")
    helper = package / "cgdr_numba" / "core" / "exp64.py"
    source = helper.read_text()
    helper.write_text(source + EDIT)
    assert end(start(GATES, settings))[0] == "0.25 False"
    helper.write_text(source)
    assert end(start(GATES, settings))[0] == first.replace("False", "True"), "the old sources' code is still there"


@pytest.mark.slow
def test_an_edit_after_the_import_spoils_no_cache(tmp_path: Path, package: Path) -> None:
    """What runs is the imported source, and must not be kept under the edited one's hash."""
    settings = {cache.FOLDER_VARIABLE: str(tmp_path / "kernels"), "PYTHONPATH": str(package)}
    helper = package / "cgdr_numba" / "core" / "exp64.py"
    edit = f"import cgdr_numba\nwith open({str(helper)!r}, 'a') as file:\n    file.write({EDIT!r})\n"
    assert end(start(edit + GATES, settings))[0].startswith("0.73105")
    assert end(start(GATES, settings))[0] == "0.25 False"


@pytest.mark.slow
def test_a_package_folder_without_write_permission(tmp_path: Path, package: Path, locked: Path) -> None:
    """Compiled code is never put beside the sources."""
    folders = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    settings = {cache.FOLDER_VARIABLE: str(tmp_path / "kernels"), "PYTHONPATH": str(package)}
    compiled, loaded = (run_without_rights(settings, GATES) for _ in range(2))
    for folder in folders:
        folder.chmod(0o755)
    assert compiled[0].endswith("False")
    assert loaded == (compiled[0].replace("False", "True"), "")
    assert not list(package.rglob("__pycache__"))


@pytest.mark.slow
def test_closures_of_the_same_code_are_not_taken_for_one_another(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
from cgdr_numba.core.jit import Compiled
from numba.core import types

def make(factor):
    def multiply(x):
        x[0] = factor * x[0]
    return Compiled(multiply, lambda: (types.Array(types.float32, 1, "C"),))

results = []
for kernel in (make(2), make(3)):
    x = np.ones(1, np.float32)
    kernel(x)
    results.append(float(x[0]))
print(*results)
"""
    settings = {cache.FOLDER_VARIABLE: str(tmp_path)}
    assert [end(start(code, settings)) for _ in range(2)] == [("2.0 3.0", "")] * 2


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    assert cache.cache_folder() == tmp_path / cache.sources_hash()
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "")
    assert cache.cache_folder() is None
    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "cgdr_numba" / cache.sources_hash()


def test_without_a_home_folder_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv(cache.FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    kernel = SimpleNamespace(py_func=no_home)
    cache._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"without a home folder.*CGDR_NUMBA_CACHE_DIR"):
        cache.enable_cache(kernel)
    cache.enable_cache(kernel)
    cache._warn_once.cache_clear()
