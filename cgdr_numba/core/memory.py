"""Where arrays come from: every result and every scratch array of a call is allocated here."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cgdr_numba.core.lease import LEASED_BYTES, Lease

ALIGNMENT_BYTES = 64
"""A cache line, and one 512-bit vector: unaligned scratch makes every wide access touch two lines."""

ALIGNED_RESULT_BYTES = 65536
"""Results from this size on begin on a cache line."""


class Scratch(NamedTuple):
    """What the workers of one call compute in."""

    arenas: NDArray[np.float32]
    """One unified buffer a bin: [n_bins, floats], each row on a cache line of its own."""
    workspace: NDArray[np.float32]
    """State between V tiles and chunks: [N, Hv, Dk, ceil8(Dv)]; empty where no sequence has a second chunk."""


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array that begins on a cache line."""
    kind = np.dtype(dtype)
    return _aligned(shape, kind, np.empty(math.prod(shape) * kind.itemsize + ALIGNMENT_BYTES, np.uint8))


def _aligned(shape: tuple[int, ...], kind: np.dtype[Any], buffer: NDArray[np.uint8]) -> NDArray[Any]:
    """Return an array in a buffer with room for ALIGNMENT_BYTES more, from its first cache line on."""
    start = -buffer.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return np.ndarray(shape, kind, buffer, start)


def result(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array for what a call returns; a large one begins on a cache line."""
    kind = np.dtype(dtype)
    n_bytes = math.prod(shape) * kind.itemsize
    if n_bytes >= LEASED_BYTES:
        return _aligned(shape, kind, np.asarray(Lease(n_bytes + ALIGNMENT_BYTES)))
    # Finding the cache line takes 2 us; without it two threads write to one line wherever V tiles meet.
    if n_bytes >= ALIGNED_RESULT_BYTES:
        return empty(shape, kind)
    return np.empty(shape, kind)


def allocate(n_bins: int, ub_bytes: int, workspace_shape: tuple[int, ...]) -> Scratch:
    """Return all scratch of one call: an arena of ub_bytes a bin, and the workspace."""
    return Scratch(scratch(n_bins, ub_bytes), empty(workspace_shape, np.float32))


def scratch(n_bins: int, n_bytes: int) -> NDArray[np.float32]:
    """Return an arena of n_bytes a bin, [n_bins, floats], each on a cache line of its own."""
    floats = -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // 4
    return empty((n_bins, floats), np.float32)
