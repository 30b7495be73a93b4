"""Phases of a chunk that all value heads of a key head share."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.fast.blocks import load_block, transpose
from cgdr_numba.core.fast.microkernel import multiply
from cgdr_numba.core.fast.pairs import prepare_pairs
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]

_load, _prepare_pairs, _transpose, _multiply = load_block, prepare_pairs, transpose, multiply


@kernel
def load_pair(
    tokens: tuple[Words, Words], kind: int, how: Any, pair: F32Array, products: F32Array, turn: F32Array
) -> None:
    """K = k and Q = scale q of r tokens (q, k), each [r, Dk, w], over their lengths where asked.

    `how` is (whether to normalise, scale). Writes pair[:2 r]; products are scratch.
    """
    q, k = tokens
    n, dk = k.shape[0], k.shape[1]
    _load(k, kind, pair[:n], turn)
    _load(q, kind, pair[n : 2 * n], turn)
    _prepare_pairs(pair[n : 2 * n, :dk], pair[:n, :dk], how[0], how[1], products)


@kernel
def compute_raw_scores(n: int, dk: int, pair: F32Array, k_turned: F32Array, raw: F32Array) -> None:
    """K K^T and Q K^T of n tokens; writes k_turned and raw[:2 n]."""
    _transpose(pair[:n, :dk], k_turned)
    _multiply(pair[: 2 * n, :dk], k_turned[:dk], raw[: 2 * n])
