"""Ours and a peer by turns, so that both meet the same machine."""

import time
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from statistics import median

REST_SECONDS = 0.05
"""Long enough for idle threads, which spin for up to 30 ms, to give back the cores that the other side needs."""
N_WARM = 5
"""Calls that do not count after a rest."""


class Turns:
    """Times ours in front of every block of a peer's rounds; to be given to a benchmark as its `setup`."""

    def __init__(self, ours: Callable[[], object], theirs: Callable[[], object], block: int) -> None:
        self._ours, self._theirs = ours, theirs
        self._block = block
        self._n_rounds = 0
        self._times: list[float] = []
        self.n_preempted = 0
        """How often ours lost a core to other work while it was timed: about never on an idle machine."""

    def __call__(self) -> None:
        """Run ours, if a block of rounds begins."""
        if self._n_rounds % self._block == 0:
            self._wake(self._ours)
            self._time_block()
            self._wake(self._theirs)
        self._n_rounds += 1

    def _time_block(self) -> None:
        before = getrusage(RUSAGE_SELF).ru_nivcsw
        for _ in range(self._block):
            begin = time.perf_counter()
            self._ours()
            self._times.append(time.perf_counter() - begin)
        self.n_preempted += getrusage(RUSAGE_SELF).ru_nivcsw - before

    @staticmethod
    def _wake(run: Callable[[], object]) -> None:
        """Let everything come to rest, then call some times without counting."""
        time.sleep(REST_SECONDS)
        for _ in range(N_WARM):
            run()

    @property
    def ours(self) -> float:
        """The median of ours, in seconds."""
        return median(self._times)
