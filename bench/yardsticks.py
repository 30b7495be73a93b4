"""What this machine can do, measured beside every benchmark: multiply-adds, and passes over memory."""

import functools
import time
from collections.abc import Callable

import numba
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from cgdr_numba.core import memory
from cgdr_numba.core.fast import microkernel
from cgdr_numba.core.jit import kernel

STEADY = 0.9
"""Smallest ratio of two repeats of a yardstick that still counts as an idle machine."""

_multiply = microkernel.multiply


@kernel
def _multiply_often(a, b, c, n):
    """N products one after another."""
    for _ in range(n):
        _multiply(a, b, c)


@numba.njit(nogil=True, fastmath={"contract"})
def _scale(x, factor):
    """Read and write every element once."""
    for i in range(len(x)):
        x[i] = x[i] * factor


@numba.njit(parallel=True)
def _scale_on_two(x, factor):
    """The same on two threads."""
    for half in numba.prange(2):
        begin = half * (len(x) // 2)
        _scale(x[begin : begin + len(x) // 2], factor)


def _best(run: Callable[[], object], rounds: int = 15) -> float:
    """Return the shortest of some runs, after one that does not count."""
    run()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def _steady(measure: Callable[[], float], name: str) -> float:
    """Return the better of two measurements; skip the benchmark where they say that the machine is not idle."""
    first, second = measure(), measure()
    if min(first, second) < STEADY * max(first, second):
        pytest.skip(f"{name} differs between two repeats, {first:.3g} and {second:.3g}: the machine is not idle")
    return max(first, second)


@functools.cache
def fma_rate() -> float:
    """Return flops a second of one core: the better of the register tile and NumPy's sgemm at 1024^3."""

    def tile() -> float:
        a, b, c = (memory.empty((128, 128), np.float32) for _ in range(3))
        a[:], b[:] = 0.5, 0.25
        return 100 * 2 * 128**3 / _best(lambda: _multiply_often(a, b, c, 100))

    def sgemm() -> float:
        a = np.full((1024, 1024), 0.5, np.float32)
        with threadpool_limits(1):
            return 2 * 1024**3 / _best(lambda: a @ a, 5)

    return max(_steady(tile, "the register tile"), _steady(sgemm, "NumPy's sgemm"))


@functools.cache
def read_modify_write(n_bytes: int, threads: int) -> float:
    """Return the seconds to read and write so many bytes in place: the better of NumPy and a compiled loop."""
    x = memory.empty((n_bytes // 4,), np.float32)
    x[:] = 1.0
    one = np.float32(1.0)

    def measure() -> float:
        if threads == 2:
            return 1 / _best(lambda: _scale_on_two(x, one))
        return 1 / min(_best(lambda: _scale(x, one)), _best(lambda: np.multiply(x, one, out=x)))

    return 1 / _steady(measure, "reading and writing in place")
