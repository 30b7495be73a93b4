"""One replay with its plan, times and errors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

from cgdr_numba.core.cache import cache_folder
from cgdr_numba.core.faithful.worker import walk_bins
from cgdr_numba.core.fast.chunk_worker import walk_chunks
from cgdr_numba.errors import ContractError
from cgdr_numba.parity import runs
from cgdr_numba.parity.operators import CHUNK_OPERATOR
from cgdr_numba.parity.runs import WORKERS, run_call, will_compile
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import Plan
from small_call import small_call


def test_golden_has_no_plan_and_nothing_to_compile() -> None:
    run = run_call(small_call(), "golden")
    assert (run.backend, run.plan, run.compile_seconds, run.loaded) == ("golden", None, None, False)
    assert sorted(run.errors) == ["final_state", "out"]
    assert (run.out.shape, run.final_state.shape) == ((8, 2, 32), (3, 2, 32, 16))
    assert not will_compile(CHUNK_OPERATOR, "golden")


def test_faithful_has_a_plan_for_its_target() -> None:
    run = run_call(small_call(), "faithful", "host")
    assert isinstance(run.plan, Plan)
    assert run.plan.device.name == "host"
    assert (run.compile_seconds, run.loaded) == (walk_bins.compile_seconds, walk_bins.loaded)
    assert (run.compile_seconds is None) == bool(numba.config.DISABLE_JIT)
    assert not will_compile(CHUNK_OPERATOR, "faithful")


def test_fast_has_a_plan_and_the_times_of_its_own_worker() -> None:
    run = run_call(small_call(), "fast")
    assert isinstance(run.plan, HostPlan)
    assert (run.compile_seconds, run.loaded) == (walk_chunks.compile_seconds, walk_chunks.loaded)
    assert (run.compile_seconds is None) == bool(numba.config.DISABLE_JIT)
    assert not will_compile(CHUNK_OPERATOR, "fast")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bounds_are_of_the_results(dtype: Any) -> None:
    for backend in ("fast", "golden", "faithful"):
        run = run_call(small_call(dtype), backend)
        bounds = [run.bound(name) for name in run.errors]
        assert bounds == [4e-4 if dtype is np.float16 and backend != "golden" else 1e-6] * 2
        assert all(found.worst is not None and found.worst <= run.bound(name) for name, found in run.errors.items())


def test_options_are_checked_by_the_operator() -> None:
    with pytest.raises(ContractError, match="`target` must be left out"):
        run_call(small_call(), "golden", "310p")
    with pytest.raises(ContractError, match="`backend` must be"):
        run_call(small_call(), "slow")


def uncompiled(worker: Any) -> Any:
    """Stands for a worker that nothing has called in this process."""
    return SimpleNamespace(compile_seconds=None, kept_as=worker.kept_as)


@pytest.mark.parametrize(("backend", "other"), [("fast", "faithful"), ("faithful", "fast")])
def test_a_run_compiles_where_nothing_of_its_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, other: str
) -> None:
    workers: dict[str, Any] = WORKERS[CHUNK_OPERATOR]
    fresh = {name: uncompiled(worker) for name, worker in workers.items()}
    monkeypatch.setattr(runs, "WORKERS", {CHUNK_OPERATOR: fresh})
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", "")
    assert will_compile(CHUNK_OPERATOR, backend)
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", str(tmp_path))
    assert will_compile(CHUNK_OPERATOR, backend)
    folder = cache_folder()
    assert folder is not None
    folder.mkdir()
    (folder / workers[other].kept_as.replace("*", "0.py311")).touch()
    assert will_compile(CHUNK_OPERATOR, backend), "a kept kernel of the other backend is of no use"
    assert not will_compile(CHUNK_OPERATOR, other)
    (folder / workers[backend].kept_as.replace("*", "0.py311")).touch()
    assert not will_compile(CHUNK_OPERATOR, backend)
    for path in folder.iterdir():
        path.unlink()
    assert will_compile(CHUNK_OPERATOR, backend)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert not will_compile(CHUNK_OPERATOR, backend)


@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_kept_kernels_are_found_by_their_names(backend: str) -> None:
    """The pattern names files that numba has really written."""
    run_call(small_call(), backend)
    folder = cache_folder()
    if numba.config.DISABLE_JIT or folder is None:
        pytest.skip("nothing is compiled, or nothing is kept")
    assert list(folder.glob(WORKERS[CHUNK_OPERATOR][backend].kept_as))
