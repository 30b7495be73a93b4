"""One core's unified buffer: the ledger's slices as views, and what a chunk hands to the phases."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK
from cgdr_numba.core.jit import kernel

F32Array = NDArray[np.float32]
Words = NDArray[np.uint16]


class Slices(NamedTuple):
    """Views of one arena at the ledger's offsets; slices that overlap there overlap here."""

    k: F32Array
    """[64, align_k]; K, then K_cd."""
    k_beta: F32Array
    """[64, align_k]; beta K, then beta K E."""
    decay: F32Array
    """[64, 64]; D, then M in the lower triangle."""
    v: F32Array
    """[64, width]; beta V, then V_new."""
    v_half: Words
    """The bytes of v as fp16 staging for K and Q."""
    scores: F32Array
    """[64, 64]; B, then A."""
    state: F32Array
    """[state_rows, width]; the state tile S."""
    attn_out: F32Array
    """[64, width]; U, then O."""
    attn_half: Words
    """The bytes of attn_out as fp16 staging for V."""
    q_cache: F32Array
    """[rows, Dk] over attn_out: scale q, dead once the scores stand."""
    g_cum: F32Array
    """[1, 64]; G."""
    delta: F32Array
    """[1, delta_size]; scratch rows."""
    dot: F32Array
    """[dot_size]; products of a dot and its partial sums."""
    exp_g: F32Array
    """[1, 64]; E."""
    out_queue: Words
    """The output queue's fp16 words."""


@kernel
def take_slices(arena: F32Array, layout: Any, dk: int) -> Slices:
    """Return the slices of one arena (flat floats) at the layout's offsets."""
    align_k, width, rows = layout.align_k, layout.width, layout.state_rows
    n_v = CHUNK * width
    n_q_rows = min(CHUNK, n_v // dk)
    queue_floats = max(rows, CHUNK) * width // 2
    v = arena[layout.v : layout.v + n_v]
    attn_out = arena[layout.attn_out : layout.attn_out + n_v]
    return Slices(
        arena[layout.k : layout.k + CHUNK * align_k].reshape(CHUNK, align_k),
        arena[layout.k_beta : layout.k_beta + CHUNK * align_k].reshape(CHUNK, align_k),
        arena[layout.decay : layout.decay + CHUNK * CHUNK].reshape(CHUNK, CHUNK),
        v.reshape(CHUNK, width),
        v.view(np.uint16),
        arena[layout.scores : layout.scores + CHUNK * CHUNK].reshape(CHUNK, CHUNK),
        arena[layout.state : layout.state + rows * width].reshape(rows, width),
        attn_out.reshape(CHUNK, width),
        attn_out.view(np.uint16),
        attn_out[: n_q_rows * dk].reshape(n_q_rows, dk),
        arena[layout.g_cum : layout.g_cum + CHUNK].reshape(1, CHUNK),
        arena[layout.delta : layout.delta + layout.delta_size].reshape(1, layout.delta_size),
        arena[layout.dot : layout.dot + layout.dot_size],
        arena[layout.exp_g : layout.exp_g + CHUNK].reshape(1, CHUNK),
        arena[layout.out_queue : layout.out_queue + queue_floats].view(np.uint16),
    )


class Kinds(NamedTuple):
    """Element kinds (dtypes.KINDS) of the arrays that come as words."""

    qkv: int
    """q, k, v and out."""
    g: int
    beta: int
    state: int
    final_state: int


class Tile(NamedTuple):
    """Columns [begin, end) of a head's values, and how they are fetched."""

    begin: int
    end: int
    padded_end: int
    """end rounded up to a block of 8 floats, as transfers to and from the workspace take it."""
    by_dma: bool
    """Whether V goes through fp16 staging."""
