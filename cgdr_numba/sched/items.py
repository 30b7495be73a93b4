"""Work items of a call, in the order in which every core walks them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims

EVERY_TILE = -1
"""Tile of an item that walks all V tiles of its head, chunk by chunk."""


def chunk_items(lengths: Sequence[int], dims: Dims, n_v_tiles: int, split: bool) -> NDArray[np.int64]:
    """Return items [n, 3] of (sequence, value head, V tile) in lexicographic order; empty sequences have none.

    Under `split` every V tile is an item; otherwise a head is one, with tile 0 where it has a single tile and
    EVERY_TILE where it has several.
    """
    sequences = [n for n, length in enumerate(lengths) if length > 0]
    tiles = range(n_v_tiles) if split else (0 if n_v_tiles == 1 else EVERY_TILE,)
    grid = np.meshgrid(
        np.array(sequences, np.int64), np.arange(dims.hv), np.array(list(tiles), np.int64), indexing="ij"
    )
    return np.ascontiguousarray(np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int64))


class DealtItems(NamedTuple):
    """Work items of a call over a pool, by cores."""

    items: NDArray[np.int64]
    """[n, 2] of (sequence, value head), core after core; each core's in order of sequence and head."""
    ptr: NDArray[np.int64]
    """CSR pointers [n_cores + 1] into items; a core may have none."""


def deal_items(lengths: Sequence[int], n_heads: int, n_cores: int) -> DealtItems:
    """Deal (sequence, value head) round robin: head h of sequence n goes to core (n n_heads + h) mod n_cores.

    Sequences without tokens have no items, and take their turns all the same.
    """
    tokens = np.repeat(np.asarray(lengths, np.int64), n_heads)
    turns = np.flatnonzero(tokens > 0)
    cores = turns % n_cores
    order = np.argsort(cores, kind="stable")
    items = np.stack([turns[order] // n_heads, turns[order] % n_heads], axis=1)
    return DealtItems(np.ascontiguousarray(items), np.searchsorted(cores[order], np.arange(n_cores + 1)))
