"""One replay with its plan, times and errors."""

from pathlib import Path

import numba
import pytest

from cgdr_numba.core.cache import cache_folder
from cgdr_numba.core.faithful.worker import walk_bins
from cgdr_numba.errors import ContractError
from cgdr_numba.parity.runs import run_call, will_compile
from small_call import small_call


def test_golden_has_no_plan_and_nothing_to_compile() -> None:
    run = run_call(small_call(), "golden")
    assert (run.backend, run.plan, run.compile_seconds) == ("golden", None, None)
    assert sorted(run.errors) == ["final_state", "out"]
    assert (run.out.shape, run.final_state.shape) == ((8, 2, 32), (3, 2, 32, 16))


def test_faithful_has_a_plan_for_its_target() -> None:
    run = run_call(small_call(), "faithful", "host")
    assert run.plan is not None
    assert run.plan.device.name == "host"
    assert (run.compile_seconds is None) == bool(numba.config.DISABLE_JIT)
    assert not will_compile()


def test_options_are_checked_by_the_operator() -> None:
    with pytest.raises(ContractError, match="`target` must be left out"):
        run_call(small_call(), "golden", "310p")
    with pytest.raises(ContractError, match="`backend` must be"):
        run_call(small_call(), "slow")


def test_a_run_compiles_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_bins, "compile_seconds", None)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", "")
    assert will_compile()
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", str(tmp_path))
    assert will_compile()
    folder = cache_folder()
    assert folder is not None
    folder.mkdir()
    (folder / "worker.nbi").touch()
    assert not will_compile()
    (folder / "worker.nbi").unlink()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert not will_compile()
