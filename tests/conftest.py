"""Fixtures of the whole suite: poisoned memory, the backends, the recorded files."""

import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cgdr_numba.core import memory
from cgdr_numba.ops import tensor_step

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

COMPILED = not numba.config.DISABLE_JIT
"""Whether kernels are compiled in this run; as plain Python they are about 100 times slower."""
SHARED_DATA = Path(os.environ.get("CGDR_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
"""Folder of the full recorded calls, where there is one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the slow tests out where kernels run as plain Python."""
    if not COMPILED:
        skip = pytest.mark.skip(reason="too slow with NUMBA_DISABLE_JIT=1")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every array that the package allocates, scratch and results, with NaN before it is used."""
    for name in ("empty", "result"):
        allocate = getattr(memory, name)

        def poisoned(shape: tuple[int, ...], dtype: Any, allocate: Any = allocate) -> Any:
            array = allocate(shape, dtype)
            array[...] = np.nan
            return array

        monkeypatch.setattr(memory, name, poisoned)
    new_tensor = tensor_step.new_tensor
    monkeypatch.setattr(tensor_step, "new_tensor", lambda like: new_tensor(like).fill_(np.nan))


@pytest.fixture(params=["fast", "golden", "faithful", "recurrent"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend of the chunked functions, and "recurrent": fused_recurrent_gated_delta_rule on fast."""
    return str(request.param)


@pytest.fixture(params=["fast", "golden", "faithful"])
def chunk_backend(request: pytest.FixtureRequest) -> str:
    """Every backend of the chunked functions."""
    return str(request.param)


@pytest.fixture
def shared_data() -> Path:
    """The folder of the full recorded calls; the test is skipped, and says so, where it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no recorded calls at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def n_examples() -> int:
    """How many random elements a test of single operations takes: fewer where kernels are plain Python."""
    return 65536 if COMPILED else 2000
