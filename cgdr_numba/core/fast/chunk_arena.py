"""Scratch of one core for chunks: what stands in for the slices of a unified buffer."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.fast.decay import Gates
from cgdr_numba.core.fast.step import Rows, rows_bytes, take_rows
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]

PAIR_ROWS: Final = 3 * C
"""Rows of K and Q together, and room for whole chunks of few tokens."""


class HeadRows(NamedTuple):
    """Slices that the phases of one value head touch; every row begins on a cache line."""

    pair: F32Array
    """[3 C, ceil16(Dk)]; K of r tokens, then Q."""
    b: F32Array
    """[C, C]"""
    m: F32Array
    """[C, C]"""
    gates: Gates
    all_decay: F32Array
    """[ceil16(Dk)]; e^G_last in every place."""
    through: F32Array
    """[3 C, width]; K S, then Q S and the outputs out of it."""
    u: F32Array
    """[C, width]; V, then e^(G_last - G) U."""
    peaks: F32Array
    """[width / 16]; the largest size of U in every 16 columns."""
    turn: F32Array
    """Flat; blocks on their way to being transposed."""


class ChunkRows(NamedTuple):
    """All slices of an arena."""

    k_turned: F32Array
    """[ceil16(Dk), C]; K^T."""
    raw: F32Array
    """[3 C, C]; K K^T, then Q K^T."""
    products: F32Array
    """[3 C]; k . q of every token."""
    head: HeadRows
    states: F32Array
    """[n, ceil16(Dk), width]; the workspace: states of n value heads between chunks."""
    bounds: F32Array
    """[n, width]; what no element of a state exceeds, for every 16 columns."""
    step: Rows
    """Rows of the token loop."""


def chunk_bytes(dk: int, dv: int, width: int, n_states: int) -> int:
    """Return the bytes of an arena for V tiles of `width` columns, a multiple of 16, of n_states heads."""
    key = (dk + 15) // 16 * 16
    shared = PAIR_ROWS * key + key * C + PAIR_ROWS * (C + 1)
    of_head = 2 * C * C + 7 * C + key + (PAIR_ROWS + C) * width + width
    turn = C * max(key, width)
    return 4 * (shared + of_head + turn + n_states * (key + 1) * width) + rows_bytes(dk, dv)


@kernel
def take_chunk_rows(arena: F32Array, sizes: tuple[int, int], width: int, n_states: int) -> ChunkRows:
    """Return the slices of an arena (flat floats) for (Dk, Dv) and V tiles of `width` columns, a multiple of 16."""
    dk, dv = sizes
    key = (dk + 15) // 16 * 16
    wide = max(key, width)
    pair = PAIR_ROWS * key
    turned = pair + key * C
    raw = turned + PAIR_ROWS * C
    products = raw + PAIR_ROWS
    b = products + C * C
    m = b + C * C
    gates = m + 7 * C
    all_decay = gates + key
    through = all_decay + PAIR_ROWS * width
    u = through + C * width
    peaks = u + width
    turn = peaks + C * wide
    states = turn + n_states * key * width
    bounds = states + n_states * width
    return ChunkRows(
        arena[pair:turned].reshape(key, C),
        arena[turned:raw].reshape(PAIR_ROWS, C),
        arena[raw:products],
        HeadRows(
            arena[:pair].reshape(PAIR_ROWS, key),
            arena[products:b].reshape(C, C),
            arena[b:m].reshape(C, C),
            Gates(
                arena[m : m + 2 * C].view(np.float64),
                arena[m + 2 * C : m + 3 * C],
                arena[m + 3 * C : m + 4 * C],
                arena[m + 4 * C : m + 5 * C],
                arena[m + 5 * C : m + 6 * C],
                arena[m + 6 * C : gates],
            ),
            arena[gates:all_decay],
            arena[all_decay:through].reshape(PAIR_ROWS, width),
            arena[through:u].reshape(C, width),
            arena[u : u + width // 16],
            arena[peaks:turn],
        ),
        arena[turn:states].reshape(n_states, key, width),
        arena[states:bounds].reshape(n_states, width),
        take_rows(arena[bounds:], dk, dv),
    )
