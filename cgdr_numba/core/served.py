"""One launch of a worker on the threads that there are, and a note of which path served the last call."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from cgdr_numba.core.threads import missing_threads, numba_threads

Route = tuple[str, str]


class Served(NamedTuple):
    """Which path served a call."""

    backend: str
    """ "fast", "faithful" or "golden"."""
    worker: str
    """ "chunks", "steps", "channels" (gates by key dimension or column) or "pool"; golden has "tokens". The chunked
    functions take "steps" up to 12 tokens."""
    bins: int
    """Bins of work items."""
    threads: int
    """Threads that the bins ran on; numba's layer may have woken fewer."""
    serial: str
    """Why there was only one: "one bin", "one thread wanted", "forked", "no threading layer", "in a parallel loop",
    "no JIT", "plain Python"; empty where there were several."""


_local = threading.local()


def last_call() -> Served | None:
    """Return which path served the last call of any of the package's operators in the calling Python thread.

    Noting it costs a tenth of a microsecond a call. What raised left no note.

    Returns:
        A `Served` of backend, worker, bins, threads and serial (why only one thread); None before the first call.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import chunk_gated_delta_rule, last_call
        >>> one = np.ones((1, 100, 1, 1), np.float32)
        >>> _ = chunk_gated_delta_rule(one, one, one, threads=1)
        >>> last_call()
        Served(backend='fast', worker='chunks', bins=1, threads=1, serial='one bin')
    """
    facts = getattr(_local, "call", None)
    return None if facts is None else Served(*facts[0], *facts[1:])


def note(route: Route, n_bins: int, n_threads: int, serial: str = "") -> None:
    """Keep the facts of the call that this Python thread has just run; `route` is (backend, worker)."""
    _local.call = (route, n_bins, n_threads, serial)


def run_bins(
    worker: Callable[[int, Any], None], route: Route, n_bins: int, threads: int | None, arguments: tuple[Any, ...]
) -> None:
    """Run all bins of a worker on `threads` threads (None: the default), and note the route."""
    if n_bins <= 1:
        # One bin runs without threads, and asking numba for its number would cost as much as a small call.
        worker(n_bins, arguments)
        note(route, n_bins, 1, "one bin")
        return
    with numba_threads(threads) as n_threads:
        worker(n_bins, arguments)
    serial = "" if n_threads > 1 else missing_threads() or "one thread wanted"
    note(route, n_bins, min(n_bins, n_threads), serial)


def noted(launch: Callable[..., None], route: Route, n_bins: int) -> Callable[..., None]:
    """Return what launches bins on one thread, and notes the route."""
    facts, local = (route, n_bins, 1, "one bin"), _local

    def run(*arguments: Any) -> None:
        """Launch, then note."""
        launch(*arguments)
        local.call = facts

    return run
