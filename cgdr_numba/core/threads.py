"""How many threads a call runs on, without leaving a trace in numba's settings; and where it may only run on one."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba


class _Layer:
    """numba's threading layer, as far as this process may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while threads run where the layer takes one caller at a time."""
        self.name: str | None = None
        """The layer's name once it has started; empty where there is none to use."""
        self.is_lost = False
        """Whether a fork has left the threads behind."""

    def start(self) -> str:
        """Return the layer's name, starting it the first time; empty, with one warning, where numba has none."""
        name = self.name
        if name is None:
            with self.lock:
                name = self.name = self.name if self.name is not None else self._start()
        return name

    def _start(self) -> str:
        """Start the layer that numba's settings ask for."""
        if self.is_lost:
            _warn(
                "this process was forked from one that runs OpenMP threads, which cannot be used here (start processes "
                "by spawn or forkserver, or set NUMBA_THREADING_LAYER=workqueue)"
            )
            return ""
        try:
            numba.get_num_threads()
            return str(numba.threading_layer())
        except (ValueError, ImportError) as reason:
            _warn(f"numba starts no threads ({' '.join(str(reason).split())})")
            return ""

    def after_fork(self) -> None:
        """Run on one thread in a child of a process that uses OpenMP: GNU's would end the child."""
        self.lock = threading.Lock()
        if self.name == "omp":
            self.name, self.is_lost = None, True


def _warn(reason: str) -> None:
    """Warn once that calls run on one thread."""
    warnings.warn(f"cgdr_numba: {reason}: running on one thread", RuntimeWarning, stacklevel=2)


_layer = _Layer()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_layer.after_fork)


def most_threads() -> int:
    """Return the largest number of threads that numba was started for."""
    return int(numba.config.NUMBA_NUM_THREADS)


def has_threads() -> bool:
    """Return whether parallel loops can run in this process; the first answer starts numba's threading layer."""
    return not numba.config.DISABLE_JIT and bool(_layer.start())


def layer_name() -> str:
    """Return the threading layer that loops run on; empty where none can be used."""
    return _layer.start() if has_threads() else ""


def current_threads() -> int:
    """Return numba's number of threads for the calling thread; 1 where no threads can be used."""
    return int(numba.get_num_threads()) if has_threads() else 1


@contextmanager
def numba_threads(n_threads: int | None) -> Iterator[None]:
    """Run the block on n_threads numba threads (None: as the calling thread has it), then put the number back."""
    before = current_threads()
    if n_threads is None or n_threads == before or not _layer.name:
        yield
        return
    numba.set_num_threads(n_threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def run_threads(walk: Callable[..., None], *arguments: Any) -> None:
    """Run a parallel loop where there are threads.

    numba's workqueue layer ends the process when two Python threads enter it, so there they take turns.
    """
    if _layer.start() == "workqueue":
        with _layer.lock:
            walk(*arguments)
    else:
        walk(*arguments)
