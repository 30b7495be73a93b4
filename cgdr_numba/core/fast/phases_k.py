"""Phases of a chunk that all value heads of a key head share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.blocks import load_block, squares, transpose
from cgdr_numba.core.fast.microkernel import multiply
from cgdr_numba.core.fast.step import multiply_row
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.l2norm import L2NORM_EPS

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_ONE, _EPS = np.float32(1.0), np.float32(L2NORM_EPS)
_load, _squares, _transpose, _multiply = load_block, squares, transpose, multiply


@kernel
def load_pair(
    tokens: tuple[Words, Words], kind: int, how: Any, pair: F32Array, squares: F32Array, turn: F32Array
) -> None:
    """K = k and Q = scale q of r tokens (q, k), each [r, Dk, w], over their lengths where asked.

    `how` is (whether to normalise, scale). Writes pair[:2 r].
    """
    q, k = tokens
    normalise, scale = how
    n, dk = k.shape[0], k.shape[1]
    _load(k, kind, pair[:n], turn)
    _load(q, kind, pair[n : 2 * n], turn)
    if normalise:
        _squares(pair[: 2 * n, :dk], squares)
        for i in range(n):
            multiply_row(pair[i], dk, _ONE / np.sqrt(squares[i] + _EPS))
            multiply_row(pair[n + i], dk, scale / np.sqrt(squares[n + i] + _EPS))
    else:
        for i in range(n):
            multiply_row(pair[n + i], dk, scale)


@kernel
def compute_raw_scores(n: int, dk: int, pair: F32Array, k_turned: F32Array, raw: F32Array) -> None:
    """K K^T and Q K^T of n tokens; writes k_turned and raw[:2 n]."""
    _transpose(pair[:n, :dk], k_turned)
    _multiply(pair[: 2 * n, :dk], k_turned[:dk], raw[: 2 * n])
