"""How many threads a call runs on, without leaving a trace in numba's settings."""

from collections.abc import Iterator
from contextlib import contextmanager

import numba


def most_threads() -> int:
    """Return the largest number of threads that numba was started for."""
    return int(numba.config.NUMBA_NUM_THREADS)


def current_threads() -> int:
    """Return numba's number of threads for the calling thread."""
    return 1 if numba.config.DISABLE_JIT else int(numba.get_num_threads())


@contextmanager
def numba_threads(n_threads: int | None) -> Iterator[None]:
    """Run the block on n_threads numba threads (None: as the calling thread has it), then put the number back."""
    before = current_threads()
    if n_threads is None or n_threads == before or numba.config.DISABLE_JIT:
        yield
        return
    numba.set_num_threads(n_threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)
