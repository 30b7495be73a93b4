"""How kernels are compiled: one decorator for device-like functions, one for the entry that Python calls."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from cgdr_numba.core.cache import enable_cache

F = TypeVar("F", bound=Callable[..., Any])

_STRICT: dict[str, Any] = {
    "nogil": True,
    # NumPy's division by zero gives inf, Python's an exception that a kernel could not raise.
    "error_model": "numpy",
    # No contraction, no reassociation: every rounding of the golden and faithful paths is part of their contract.
    "fastmath": False,
}


def kernel(function: F) -> F:
    """Compile `function` strictly, at its first use; with NUMBA_DISABLE_JIT=1 it stays plain Python.

    Kernels allocate nothing and count no references: counting cost more than a small head's whole work. So what a
    kernel returns, where that is a view, is for other kernels alone; from Python it would come without an owner.
    """
    return numba.njit(_nrt=False, **_STRICT)(function)  # type: ignore[no-any-return]


def inlined_kernel(function: F) -> F:
    """Compile as `kernel` does, into its callers, so that a loop over its calls can become vector code."""
    return numba.njit(_nrt=False, forceinline=True, **_STRICT)(function)  # type: ignore[no-any-return]


class Entry:
    """A kernel, parallel as a rule, with exactly one compiled signature, compiled at its first call.

    One signature means that no stride pattern, byte alignment or dtype of a user's array compiles anything again.
    """

    def __init__(
        self, function: Callable[..., Any], argument_types: Callable[[], tuple[Any, ...]], *, parallel: bool = True
    ) -> None:
        """Take the kernel and a function that gives the numba types of its arguments."""
        self._argument_types = argument_types
        self._lock = threading.Lock()
        self._is_plain = self._ready = bool(numba.config.DISABLE_JIT)
        self._call = numba.njit(parallel=parallel, **_STRICT)(function)
        self.compile_seconds: float | None = None
        """Seconds that compiling or loading took in this process; None before the first call and without JIT."""
        self.loaded = False
        """Whether the compiled code came from the cache on disk."""
        self.__doc__ = function.__doc__

    def compile(self) -> None:
        """Compile now, if that has not happened yet."""
        with self._lock:
            if not self._ready:
                enable_cache(self._call)
                begin = time.perf_counter()
                self._call.compile(self._argument_types())
                self._call.disable_compile()
                self.compile_seconds = time.perf_counter() - begin
                self.loaded = bool(self._call.stats.cache_hits)
                self._ready = True

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel; it returns nothing and writes into its last arguments."""
        if self._is_plain:
            # Plain NumPy scalars warn where compiled code does not.
            with np.errstate(all="ignore"):
                self._call(*arguments)
            return
        if not self._ready:
            self.compile()
        self._call(*arguments)
