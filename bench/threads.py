"""How many threads benchmarks run on."""

import pytest

from cgdr_numba.core.threads import most_threads

on_threads = pytest.mark.parametrize(
    "threads", [1, pytest.param(2, marks=pytest.mark.skipif(most_threads() < 2, reason="numba has one thread here"))]
)
"""Runs a benchmark on one thread and on two; on one alone where the process is tied to one core."""
