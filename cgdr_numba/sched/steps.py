"""Work of a recurrent call: (sequence, key head) items in bins, for threads of the host."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.sched.bins import fill_bins


class StepPlan(NamedTuple):
    """Which bin runs which items."""

    items: NDArray[np.int64]
    """[n, 2]: sequence, key head; the value heads of a key head go with it."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""

    @property
    def n_bins(self) -> int:
        """Bins that hold items."""
        return len(self.bin_ptr) - 1


@functools.lru_cache(maxsize=256)
def plan_steps(dims: Dims, lengths: tuple[int, ...], n_threads: int) -> StepPlan:
    """Return items in order of sequence and key head, in bins by the greedy rule with tokens as the load."""
    items = np.array(
        [(n, head) for n, length in enumerate(lengths) if length for head in range(dims.hk)], np.int64
    ).reshape(-1, 2)
    return StepPlan(items, fill_bins([lengths[n] for n in items[:, 0]], n_threads))
