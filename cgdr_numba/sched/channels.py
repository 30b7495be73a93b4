"""Work of a call whose channels or columns forget by themselves: items as of a chunked call on fast, by tokens."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.fast.channel_step import channel_bytes
from cgdr_numba.sched.host_plan import best_work


class ChannelPlan(NamedTuple):
    """Which bin runs which items. Which plan runs changes no bit of the results."""

    n_together: int
    """Value heads of an item, as far as its key head has so many left."""
    width: int
    """Columns of a V tile, a multiple of 16."""
    items: NDArray[np.int64]
    """[n, 3]: sequence, key head, part; a part is a group of value heads and a V tile, which goes fastest."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""
    arena_bytes: int
    """Scratch of a bin."""

    @property
    def n_bins(self) -> int:
        """Bins that hold items."""
        return len(self.bin_ptr) - 1


@functools.lru_cache(maxsize=256)
def plan_channels(dims: Dims, lengths: tuple[int, ...], n_bins: int, fast_bytes: int) -> ChannelPlan:
    """Return the plan for at most n_bins bins whose scratch fits into fast_bytes of cache where it can."""
    cut, work = best_work(
        dims, lengths, n_bins, lambda cut: channel_bytes(dims.dk, cut.width, cut.n_together) <= fast_bytes
    )
    arena_bytes = channel_bytes(dims.dk, cut.width, cut.n_together)
    return ChannelPlan(cut.n_together, cut.width, work.items, work.bin_ptr, arena_bytes)
