"""A plan as kernels take it: tuples of integers, a leaf that the scheduler fills and the workers read."""

from typing import NamedTuple


class UbLayout(NamedTuple):
    """The unified buffer's slices: offsets in 4-byte elements from its start, and the slices' widths."""

    out_queue: int
    k: int
    k_beta: int
    decay: int
    v: int
    scores: int
    state: int
    attn_out: int
    g_cum: int
    delta: int
    dot: int
    exp_g: int
    align_k: int
    """Columns of k and k_beta."""
    state_rows: int
    """Rows of the state tile."""
    width: int
    """Columns of v, attn_out and the state tile: v_step rounded up to 8."""
    delta_size: int
    dot_size: int


class ChunkSchedule(NamedTuple):
    """What a core has to know to run its items."""

    chunk: int
    """Tokens of a chunk."""
    v_step: int
    """Columns of a V tile."""
    n_v_tiles: int
    """V tiles of a head."""
    k_dma_rows: int
    """Rows up to which a chunk's K comes through fp16 staging; 0 for never."""
    q_cache_rows: int
    """Rows up to which scale * q is kept for the scores; 0 for never."""
    v_dma_full: int
    """1 where a full V tile comes through fp16 staging."""
    v_dma_last: int
    """The same for the last V tile of a head."""
