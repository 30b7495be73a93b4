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


class PoolLayout(NamedTuple):
    """A core's unified buffer in a call over a pool: offsets in 4-byte elements from its start, and row widths."""

    state_queue: int
    state_out: int
    attn_out: int
    attn: int
    v: int
    q: int
    k: int
    state: int
    product: int
    beta: int
    g: int
    gk: int
    align_k: int
    """Columns of q, k, a vector gk and rows of the state tile: Dk rounded up to 16."""
    align_v: int
    """Columns of v."""


class PoolSchedule(NamedTuple):
    """What a core has to know to run its items of a call over a pool."""

    v_step: int
    """Columns of a V tile."""
    n_v_tiles: int
    """V tiles of a head."""
    state_depth: int
    """Buffers of the queue that states leave through."""
    attn_depth: int
    """Buffers of the queue that outputs leave through."""
    has_g: bool
    has_scalar_gk: bool
    has_vector_gk: bool
