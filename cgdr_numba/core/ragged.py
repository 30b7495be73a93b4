"""Sequences of unequal length: where each begins, and which key head serves a value head."""

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims


class Sequences(NamedTuple):
    """Where the tokens of sequence n lie: rows [start[n], start[n] + length[n]) of batch row[n]. All int64 [N]."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def packed(lengths: NDArray[np.int64]) -> Sequences:
    """Return sequences that follow one another in a single batch row; starts are 64-bit sums whatever came in."""
    sizes = np.asarray(lengths, np.int64)
    starts = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=starts[1:])
    return Sequences(np.zeros(len(sizes), np.int64), starts, sizes)


@functools.lru_cache(maxsize=64)
def dense(n_rows: int, n_tokens: int) -> Sequences:
    """Return one sequence of n_tokens a batch row; nobody writes into the arrays, so calls may share them."""
    rows = np.arange(n_rows, dtype=np.int64)
    return Sequences(rows, np.zeros(n_rows, np.int64), np.full(n_rows, n_tokens, np.int64))


def value_to_key_head(value_head: int, dims: Dims) -> int:
    """Return the head of q and k that serves a value head: neighbours share one."""
    return value_head // (dims.hv // dims.hk)
