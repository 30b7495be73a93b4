"""Plans of the fast backend: V tiles, (sequence, key head, V tile) items and bins for threads of the host."""

import functools
import heapq
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims, ceil_div, ceil_to
from cgdr_numba.core.fast.chunk_arena import chunk_bytes
from cgdr_numba.sched.bins import fill_bins
from cgdr_numba.sched.steps import StepPlan, plan_steps

LANES = 16
"""V tiles are whole vectors of the widest instruction set, so that they are the same everywhere."""
SHARED_COLUMNS = 24
"""What an item computes once for all of its value heads costs about as much as so many columns of one of them."""
GOOD_ENOUGH = 1.02
"""More tiles are taken only where the fullest bin gets lighter by this factor: each repeats the shared work."""


class Work(NamedTuple):
    """Items in bins."""

    items: NDArray[np.int64]
    """[n, 3]: sequence, key head, V tile."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""
    heaviest: int
    """Load of the fullest bin, in columns of a value head times tokens."""


class HostKey(NamedTuple):
    """What a plan was made for; a call must match it to use the plan."""

    dims: Dims
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """How a chunked call runs on fast. Which plan runs changes no bit of the results."""

    key: HostKey
    width: int
    """Columns of a V tile, a multiple of 16."""
    items: NDArray[np.int64]
    """[n, 3]: sequence, key head, V tile; the value heads of a key head go with it."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""
    arena_bytes: int
    """Scratch of a bin."""
    steps: StepPlan
    """Work of the token loop, which runs instead where no sequence is worth a chunk."""

    @property
    def n_bins(self) -> int:
        """Bins that hold items."""
        return len(self.bin_ptr) - 1


@functools.lru_cache(maxsize=256)
def plan_host(dims: Dims, lengths: tuple[int, ...], n_bins: int, fast_bytes: int) -> HostPlan:
    """Return the plan for at most n_bins bins whose scratch fits into fast_bytes of cache where it can.

    The widest tile that fits comes first; narrower ones are for filling more bins evenly.
    """
    n_shared, widest = dims.hv // dims.hk, ceil_to(dims.dv, LANES)
    while widest > LANES and chunk_bytes(dims.dk, dims.dv, widest, n_shared) > fast_bytes:
        widest = ceil_to(widest // 2, LANES)
    best, best_width = _work(dims, lengths, widest, n_bins), widest
    width = widest
    while n_bins > 1 and width > LANES:
        width = ceil_to(width // 2, LANES)
        work = _work(dims, lengths, width, n_bins)
        if work.heaviest * GOOD_ENOUGH < best.heaviest:
            best, best_width = work, width
    return HostPlan(
        key=HostKey(dims, lengths),
        width=best_width,
        items=best.items,
        bin_ptr=best.bin_ptr,
        arena_bytes=chunk_bytes(dims.dk, dims.dv, best_width, n_shared),
        steps=plan_steps(dims, lengths, n_bins),
    )


def _work(dims: Dims, lengths: tuple[int, ...], width: int, n_bins: int) -> Work:
    """Return items in bins by the greedy rule, in the order of items whose fullest bin is lightest.

    The rule closes a bin once it reaches the average, so the order decides how far a bin is overfilled.
    """
    n_shared, n_tiles = dims.hv // dims.hk, ceil_div(dims.dv, width)
    items = np.array(
        [
            (n, head, tile)
            for n, length in enumerate(lengths)
            if length
            for head in range(dims.hk)
            for tile in range(n_tiles)
        ],
        np.int64,
    ).reshape(-1, 3)
    columns = [min(width, dims.dv - tile * width) * n_shared + SHARED_COLUMNS for tile in range(n_tiles)]
    loads = np.array([lengths[n] * columns[tile] for n, _, tile in items.tolist()], np.int64)
    best = _fill(items, loads, n_bins)
    if n_bins > 1:
        evened = _evened_order(loads, n_bins)
        other = _fill(items[evened], loads[evened], n_bins)
        best = other if other.heaviest < best.heaviest else best
    return best


def _fill(items: NDArray[np.int64], loads: NDArray[np.int64], n_bins: int) -> Work:
    """Return the items in bins, in the order given."""
    bin_ptr = fill_bins(loads, n_bins)
    sums = [int(loads[a:b].sum()) for a, b in itertools.pairwise(bin_ptr)]
    return Work(items, bin_ptr, max(sums, default=0))


def _evened_order(loads: NDArray[np.int64], n_bins: int) -> NDArray[np.int64]:
    """Return an order of items that the greedy rule cuts into nearly even bins.

    Longest first, each to the lightest bin so far; then the bins from heavy to light, each with its longest item last,
    which is the one that carries it over the average.
    """
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    totals = [(0, b) for b in range(n_bins)]
    for item in np.argsort(-loads, kind="stable").tolist():
        total, b = heapq.heappop(totals)
        bins[b].append(item)
        heapq.heappush(totals, (total + int(loads[item]), b))
    order = [b for _, b in sorted(totals, key=lambda total: (-total[0], total[1]))]
    return np.array([item for b in order for item in reversed(bins[b])], np.int64)
