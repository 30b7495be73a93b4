"""How many threads a call runs on, without leaving a trace in numba's settings; and where it may only run on one."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba

from cgdr_numba.core.cores import cores


class _Layer:
    """numba's threading layer, as far as this process may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while threads run where the layer takes one caller at a time."""
        self.name: str | None = None
        """The layer's name once it has started; empty where there is none to use."""
        self.is_lost = False
        """Whether a fork has left the threads behind."""

    @property
    def missing(self) -> str:
        """Why the calling thread can use no others; empty where it can, once the layer has started."""
        if numba.config.DISABLE_JIT:
            return "no JIT"
        if self.name:
            return "in a parallel loop" if self.name == "workqueue" and _is_foreign() else ""
        return "forked" if self.is_lost else "no threading layer"

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


def _is_foreign() -> bool:
    """Return whether the calling thread was not started by Python, as those of numba's parallel loops are not."""
    return isinstance(threading.current_thread(), threading._DummyThread)


_layer = _Layer()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_layer.after_fork)


def most_threads() -> int:
    """Return the largest number of threads that numba was started for."""
    return int(numba.config.NUMBA_NUM_THREADS)


def has_threads() -> bool:
    """Return whether the calling thread can run parallel loops; the first answer starts numba's threading layer.

    numba's workqueue layer ends the process where a loop starts another one, so there its own threads run none.
    """
    return not numba.config.DISABLE_JIT and bool(_layer.start()) and not _layer.missing


def layer_name() -> str:
    """Return the threading layer that loops run on; empty where none can be used."""
    return _layer.start() if has_threads() else ""


def missing_threads() -> str:
    """Return why the calling thread can use no others, as `Served.serial` has it; empty where it can."""
    return _layer.missing


def current_threads() -> int:
    """Return how many threads a call takes that does not say; 1 where no threads can be used.

    They are numba's number for the calling thread, but no more than the process may have cores: by its affinity mask
    and by the quota of its control groups.
    """
    return min(int(numba.get_num_threads()), cores().usable) if has_threads() else 1


@contextmanager
def numba_threads(n_threads: int | None) -> Iterator[int]:
    """Run the block on n_threads numba threads (None: `current_threads`), then put numba's number back.

    Yields the number of threads that there are: 1 where none can be used.
    """
    if not has_threads():
        yield 1
        return
    before = int(numba.get_num_threads())
    wanted = min(before, cores().usable) if n_threads is None else n_threads
    if wanted == before:
        yield wanted
        return
    numba.set_num_threads(wanted)
    try:
        yield wanted
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
