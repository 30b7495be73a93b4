"""Phases of a chunk that all value heads of a key head share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.blocks import load_block, squares, transpose
from cgdr_numba.core.fast.chunk_arena import ChunkRows
from cgdr_numba.core.fast.microkernel import multiply
from cgdr_numba.core.fast.step import multiply_row
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.l2norm import L2NORM_EPS

Words = NDArray[np.uint16]

_ONE, _EPS = np.float32(1.0), np.float32(L2NORM_EPS)
_load, _squares, _transpose, _multiply = load_block, squares, transpose, multiply


@kernel
def load_pair(q: Words, k: Words, kind: int, how: Any, x: ChunkRows) -> None:
    """K = k and Q = scale q of r tokens [r, Dk, w], each over its length where `how` (normalise, scale) says so.

    Writes pair[:2 r], k_turned[:, :r].
    """
    normalise, scale = how
    n, dk = k.shape[0], k.shape[1]
    _load(k, kind, x.pair[:n], x.turn)
    _load(q, kind, x.pair[n : 2 * n], x.turn)
    if normalise:
        _squares(x.pair[: 2 * n, :dk], x.squares)
        for i in range(n):
            multiply_row(x.pair[i], dk, _ONE / np.sqrt(x.squares[i] + _EPS))
            multiply_row(x.pair[n + i], dk, scale / np.sqrt(x.squares[n + i] + _EPS))
    else:
        for i in range(n):
            multiply_row(x.pair[n + i], dk, scale)
    _transpose(x.pair[:n, :dk], x.k_turned)


@kernel
def compute_raw_scores(n: int, dk: int, x: ChunkRows) -> None:
    """K K^T and Q K^T of n tokens; writes raw[:2 n]."""
    _multiply(x.pair[: 2 * n, :dk], x.k_turned[:dk], x.raw[: 2 * n])
