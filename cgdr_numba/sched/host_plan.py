"""Plans of the fast backend: V tiles, (sequence, key head, part) items and bins for threads of the host."""

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import FAST_CHUNK, Dims, ceil_div, ceil_to
from cgdr_numba.core.fast.chunk_arena import chunk_bytes
from cgdr_numba.core.threads import current_threads
from cgdr_numba.errors import DtypeError
from cgdr_numba.sched.bins import fill_bins
from cgdr_numba.sched.device import host_cache_bytes, resolve
from cgdr_numba.sched.explain import explain_host
from cgdr_numba.sched.sizes import MAX_LOAD, checked_lengths
from cgdr_numba.sched.steps import StepPlan, plan_steps

LANES = 16
"""V tiles are whole vectors of the widest instruction set, so that they are the same everywhere."""
SHARED_COLUMNS = 10
"""What an item computes once for its value heads costs about as much as so many columns of one of them."""
HEAD_COLUMNS = 6
"""The same for what it computes once for each of its value heads."""
GOOD_ENOUGH = 1.02
"""Smaller items are taken only where the fullest bin gets lighter by this factor: each repeats the shared work."""


class Cut(NamedTuple):
    """How the value columns of a key head are cut into parts."""

    n_together: int
    """Value heads of a part."""
    width: int
    """Columns of its V tile, a multiple of 16."""


class Work(NamedTuple):
    """Items in bins."""

    items: NDArray[np.int64]
    """[n, 3]: sequence, key head, part."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""
    heaviest: int
    """Load of the fullest bin."""


class HostKey(NamedTuple):
    """What a plan was made for; a call must match it to use the plan."""

    dims: Dims
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostPlan:
    """How a chunked call runs on fast. Which plan runs changes no bit of the results."""

    key: HostKey
    n_threads: int
    """Bins that there may be at the most."""
    cache_bytes: int
    """Fast memory of a core, which a bin's scratch should fit into."""
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
    steps: StepPlan
    """Work of the token loop, which runs instead where no sequence is worth a chunk."""

    @property
    def n_bins(self) -> int:
        """Bins that hold items; at most n_threads."""
        return len(self.bin_ptr) - 1

    @property
    def n_v_tiles(self) -> int:
        """V tiles of a head; the last one may have fewer columns that mean something."""
        return ceil_div(self.key.dims.dv, self.width)

    def bin_tokens(self) -> list[int]:
        """Return the tokens of every bin's items together."""
        return _sums(np.array(self.key.lengths, np.int64)[self.items[:, 0]], self.bin_ptr)

    def bin_loads(self) -> list[int]:
        """Return every bin's load: tokens of its items times their columns.

        The columns of an item are those of its V tile in all of its value heads, 6 more for each of them, and 10 for
        the work that they share.
        """
        return _sums(_item_loads(*self.key, Cut(self.n_together, self.width), self.items), self.bin_ptr)

    def balance(self) -> float:
        """Return mean load / largest load over the threads; 1 is perfect."""
        loads = self.bin_loads()
        return sum(loads) / (max(loads) * self.n_threads) if loads else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``cgdr plan --backend fast --json`` prints them."""
        bins = zip(self.bin_tokens(), self.bin_loads(), itertools.pairwise(self.bin_ptr), strict=True)
        return {
            "operator": "chunk_gated_delta_rule",
            "backend": "fast",
            "threads": self.n_threads,
            "cache_bytes": self.cache_bytes,
            "dims": self.key.dims._asdict(),
            "lengths": list(self.key.lengths),
            "chunk": FAST_CHUNK,
            "n_together": self.n_together,
            "width": self.width,
            "n_v_tiles": self.n_v_tiles,
            "arena_bytes": self.arena_bytes,
            "bins": [
                {"bin": b, "tokens": tokens, "load": load, "items": self.items[begin:end].tolist()}
                for b, (tokens, load, (begin, end)) in enumerate(bins)
            ],
        }

    def explain(self) -> str:
        """Return the plan in words: V tiles, scratch, bins and their balance."""
        return explain_host(self)


@functools.lru_cache(maxsize=256)
def plan_host(dims: Dims, lengths: tuple[int, ...], n_bins: int, fast_bytes: int) -> HostPlan:
    """Return the plan for at most n_bins bins whose scratch fits into fast_bytes of cache where it can.

    The largest items that fit come first; smaller ones are for filling more bins evenly.
    """
    best_cut, best = best_work(
        dims, lengths, n_bins, lambda cut: chunk_bytes(dims.dk, dims.dv, cut.width, cut.n_together) <= fast_bytes
    )
    return HostPlan(
        key=HostKey(dims, lengths),
        n_threads=n_bins,
        cache_bytes=fast_bytes,
        n_together=best_cut.n_together,
        width=best_cut.width,
        items=best.items,
        bin_ptr=best.bin_ptr,
        arena_bytes=chunk_bytes(dims.dk, dims.dv, best_cut.width, best_cut.n_together),
        steps=plan_steps(dims, lengths, n_bins),
    )


def best_work(dims: Dims, lengths: tuple[int, ...], n_bins: int, fits: Callable[[Cut], bool]) -> tuple[Cut, Work]:
    """Return the cut and the work of a plan: the largest items that fit, or smaller ones where bins get lighter."""
    cuts = _cuts(dims)
    fitting = [cut for cut in cuts if fits(cut)]
    best_cut = fitting[0] if fitting else cuts[-1]
    best = _work(dims, lengths, best_cut, n_bins)
    for cut in fitting[1:] if n_bins > 1 else ():
        work = _work(dims, lengths, cut, n_bins)
        if work.heaviest * GOOD_ENOUGH < best.heaviest:
            best, best_cut = work, cut
    return best_cut, best


def _cuts(dims: Dims) -> list[Cut]:
    """Return the ways to cut, from whole key heads by halves to single value heads, then to V tiles of 16 columns."""
    cuts = [Cut(dims.hv // dims.hk, ceil_to(dims.dv, LANES))]
    while cuts[-1] != Cut(1, LANES):
        n_together, width = cuts[-1]
        cuts.append(Cut(ceil_div(n_together, 2), width) if n_together > 1 else Cut(1, ceil_to(width // 2, LANES)))
    return cuts


def make_host_plan(op: str, dims: Dims, lengths: object, *, target: object = None, threads: object = None) -> HostPlan:
    """Return `plan_chunk`'s plan for fast, for the public function `op`, whose name begins every message."""
    sizes, checks = checked_lengths(op, dims, lengths), Checks(op)
    if threads is not None and (not isinstance(threads, (int, np.integer)) or isinstance(threads, bool)):
        raise DtypeError(f"{op}: `threads` must be an integer or None, got {threads!r}")
    if threads is not None and threads < 1:
        raise checks.error(f"`threads` must be at least 1, got {threads}")
    columns = dims.hv * (SHARED_COLUMNS + HEAD_COLUMNS) * ceil_div(dims.dv, LANES) + dims.hv * dims.dv
    if dims.n_tokens * columns > MAX_LOAD:
        raise checks.error(f"`lengths` must sum to at most 2^62 / (columns of all items), got {dims.n_tokens}")
    if target is None:
        n_bins, fast_bytes = current_threads(), host_cache_bytes()
    else:
        device = resolve(target, "host", op)
        n_bins, fast_bytes = device.cores, device.ub_bytes
    return plan_host(dims, sizes, n_bins if threads is None else int(threads), fast_bytes)


def _work(dims: Dims, lengths: tuple[int, ...], cut: Cut, n_bins: int) -> Work:
    """Return items in bins by the greedy rule, in the order of items whose fullest bin is lightest.

    The rule closes a bin once it reaches the average, so the order decides how far a bin is overfilled.
    """
    parts = np.arange(ceil_div(dims.hv // dims.hk, cut.n_together) * ceil_div(dims.dv, cut.width))
    grid = np.meshgrid(np.flatnonzero(np.array(lengths, np.int64)), np.arange(dims.hk), parts, indexing="ij")
    items = np.ascontiguousarray(np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int64))
    loads = _item_loads(dims, lengths, cut, items)
    best = _fill(items, loads, n_bins)
    if n_bins > 1:
        evened = _evened_order(loads, min(n_bins, len(loads)))
        other = _fill(items[evened], loads[evened], n_bins)
        best = other if other.heaviest < best.heaviest else best
    return best


def _fill(items: NDArray[np.int64], loads: NDArray[np.int64], n_bins: int) -> Work:
    """Return the items in bins, in the order given."""
    bin_ptr = fill_bins(loads, n_bins)
    return Work(items, bin_ptr, max(_sums(loads, bin_ptr), default=0))


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


def _item_loads(dims: Dims, lengths: tuple[int, ...], cut: Cut, items: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the load of every item: its tokens times its columns, those for shared work among them."""
    group, tile = np.divmod(items[:, 2], ceil_div(dims.dv, cut.width))
    n_heads = np.minimum(cut.n_together, dims.hv // dims.hk - cut.n_together * group)
    columns = n_heads * (np.minimum(cut.width, dims.dv - cut.width * tile) + HEAD_COLUMNS) + SHARED_COLUMNS
    loads: NDArray[np.int64] = np.array(lengths, np.int64)[items[:, 0]] * columns
    return loads


def _sums(values: NDArray[np.int64], bin_ptr: NDArray[np.int64]) -> list[int]:
    """Return the sum of every bin's values."""
    return [int(values[begin:end].sum()) for begin, end in itertools.pairwise(bin_ptr)]
