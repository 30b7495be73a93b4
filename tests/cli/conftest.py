"""A recorded call in a file."""

from pathlib import Path

import pytest

from cgdr_numba.parity.calls import save_call
from small_call import small_call


@pytest.fixture
def call_path(tmp_path: Path) -> Path:
    """A small recorded call whose second sequence is empty."""
    path = tmp_path / "call.safetensors"
    save_call(path, small_call())
    return path
