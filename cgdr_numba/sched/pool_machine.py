"""How RGDR overlaps: the machine that brings states in one V tile ahead, and what a head costs in instructions."""

from collections.abc import Iterator
from typing import NamedTuple

from cgdr_numba.core.dims import Dims, ceil_div, ceil_to
from cgdr_numba.sched.device import FP16_PER_BLOCK
from cgdr_numba.sched.ledger import FP16_BYTES
from cgdr_numba.sched.profile import StepTiling


class MachineStep(NamedTuple):
    """One step of a head's walk over its V tiles, and what it leaves behind."""

    action: str
    queue_slot: str
    """The one fp16 buffer of the queue that states come in through."""
    ub_copy: str
    """The float32 state tile that tokens are computed on."""
    queue: str
    """full: a transfer was issued into the slot; empty: taken out; free: given back."""


def machine_steps(n_v_tiles: int) -> Iterator[MachineStep]:
    """Yield the steps of a head in the order in which a core takes them.

    Between the prefetch of the next tile and the tokens of the tile at hand lies the only overlap: one transfer is
    under way while one tile is computed, because the slot and the copy exist at the same time.
    """
    copy = "stale"
    if n_v_tiles:
        yield MachineStep("prefetch tile 0", "tile 0 (fp16)", copy, "full")
    for tile in range(n_v_tiles):
        yield MachineStep(f"take tile {tile} out", "empty", copy, "empty")
        copy = f"tile {tile} (fp32)"
        yield MachineStep(f"widen tile {tile}", "empty", copy, "empty")
        yield MachineStep("wait: vector before transfer in", "empty", copy, "empty")
        yield MachineStep("give the slot back", "empty", copy, "free")
        slot, queue = "empty", "free"
        if tile + 1 < n_v_tiles:
            slot, queue = f"tile {tile + 1} (fp16)", "full"
            yield MachineStep(f"prefetch tile {tile + 1}", slot, copy, queue)
        copy = f"tile {tile}, moved on"
        yield MachineStep(f"all tokens of tile {tile}", slot, copy, queue)


class HeadCounts(NamedTuple):
    """What one value head of a sequence costs, over all its V tiles."""

    dots: int
    """DotFp32: two a token and row, of the state with k and with q."""
    state_reads: int
    """Transfers of state tiles in, one a tile."""
    hidden_reads: int
    """Those that run while another tile is computed."""
    state_writes: int
    """Transfers of state rows out, one a token and row."""
    state_write_bytes: int
    """Bytes of each of them."""
    attn_writes: int
    """Transfers of outputs out, one a token and tile."""
    hidden_attn_writes: int
    """Those issued behind the next token's computation, as a queue of depth 2 allows."""
    store_barriers: int
    """Waits of the vector unit for transfers out, one after each token's outputs and one after its states."""
    load_barriers: int
    """Waits of transfers in for the vector unit: one behind q, k and v, one a tile."""

    @property
    def writes(self) -> int:
        """Transfers out."""
        return self.state_writes + self.attn_writes


def head_counts(n_tokens: int, dims: Dims, tiling: StepTiling) -> HeadCounts:
    """Return the counts of a value head of a sequence with so many tokens."""
    n_tiles = tiling.n_v_tiles
    hidden = (n_tokens - 1) * n_tiles if tiling.profile.attn_out == 2 and n_tokens else 0
    return HeadCounts(
        dots=2 * n_tokens * dims.dv,
        state_reads=n_tiles,
        hidden_reads=n_tiles - 1,
        state_writes=n_tokens * dims.dv,
        state_write_bytes=dims.dk * FP16_BYTES,
        attn_writes=n_tokens * n_tiles,
        hidden_attn_writes=hidden,
        store_barriers=2 * n_tokens * n_tiles,
        load_barriers=n_tiles + 1,
    )


def dots_a_tile_token(dims: Dims, v_step: int) -> int:
    """Return the dots of a token in a full V tile."""
    return 2 * min(v_step, dims.dv)


def state_slot_bytes(dims: Dims, v_step: int) -> int:
    """Return the bytes of one fp16 buffer for a state tile, in the queues in and out."""
    return ceil_to(dims.dk, FP16_PER_BLOCK) * v_step * FP16_BYTES


def n_dot_groups(dims: Dims) -> int:
    """Return the groups of 64 lanes that a dot's tree adds up before the scalar unit."""
    return ceil_to(dims.dk, FP16_PER_BLOCK) // 64


def heads_a_core(dims: Dims, block_dim: int) -> int:
    """Return the largest number of (sequence, value head) that a core is dealt."""
    return ceil_div(dims.n_sequences * dims.hv, block_dim)
