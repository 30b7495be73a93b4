"""CGDR's host tiling: the V tile width that fits, how many cores start, which chunks take the fast loads."""

from dataclasses import dataclass
from typing import NamedTuple

from cgdr_numba.core.dims import CHUNK, Dims, ceil_div, ceil_to
from cgdr_numba.errors import BudgetError, ContractError
from cgdr_numba.sched.device import (
    BLOCK_BYTES,
    FP16_PER_BLOCK,
    FP32_PER_BLOCK,
    MAX_DMA_GAP_BLOCKS,
    DeviceSpec,
)
from cgdr_numba.sched.ledger import FP16_BYTES, FP32_BYTES, UbLedger


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    """What the host decides before a launch."""

    v_step: int
    """Columns of a V tile, a multiple of 16."""
    n_v_tiles: int
    """V tiles of a head."""
    overlap: bool
    """Whether the state tile lies over the scores."""
    split: bool
    """Whether every V tile is a work item of its own."""
    block_dim: int
    """Cores that start."""
    ledger: UbLedger


class LoadPaths(NamedTuple):
    """Up to how many rows a chunk takes each fast load (0: never); the numbers read are the same on both paths."""

    k_dma_rows: int
    """K through fp16 staging in the V slice."""
    q_cache_rows: int
    """Q * scale kept in the output slice for the scores."""
    v_dma_full: int
    """1 where a full V tile goes through fp16 staging in the output slice."""
    v_dma_last: int
    """The same for the last tile of a head, which may be narrower."""


def solve_tiling(dims: Dims, device: DeviceSpec, v_step: object, op: str) -> ChunkTiling:
    """Return the widest V tile that fits the UB, and the launch that follows from it.

    `op` begins messages. `v_step` asks for a width instead of searching; it must be a multiple of 16, no wider than
    Dv rounded up to 16, and fit. Raises BudgetError, with the ledger, where nothing fits.
    """
    widest = ceil_to(dims.dv, FP16_PER_BLOCK)
    few_heads = dims.hv < device.cores
    if v_step is not None and (
        not isinstance(v_step, int) or v_step % FP16_PER_BLOCK or not FP16_PER_BLOCK <= v_step <= widest
    ):
        raise ContractError(
            f"{op}: `v_step` must be a multiple of {FP16_PER_BLOCK} from {FP16_PER_BLOCK} to {widest}, got {v_step!r}"
        )
    candidates: range | tuple[int] = range(widest, 0, -FP16_PER_BLOCK) if v_step is None else (v_step,)
    for width in candidates:
        overlap = width >= dims.dv or few_heads
        ledger = UbLedger.for_chunk(dims, width, overlap, device.ub_bytes)
        if ledger.free_bytes >= 0:
            return _launch(dims, device, width, ledger)
    raise BudgetError(
        f"{op}: `target`: no V tile fits the UB of {device.name}: even {width} columns of Dk = {dims.dk} need "
        f"{ledger.total_bytes} bytes, got {device.ub_bytes}\n{ledger}"
    )


def _launch(dims: Dims, device: DeviceSpec, v_step: int, ledger: UbLedger) -> ChunkTiling:
    """Return the tiling with the host's block_dim rule and the device's split rule applied."""
    n_v_tiles = ceil_div(dims.dv, v_step)
    n_items = dims.hv * n_v_tiles if dims.hv < device.cores and n_v_tiles > 1 else dims.hv
    block_dim = max(1, min(n_items, device.cores))
    return ChunkTiling(
        v_step=v_step,
        n_v_tiles=n_v_tiles,
        overlap=ledger["state"].over is not None,
        split=dims.dv > v_step and block_dim > dims.hv,
        block_dim=block_dim,
        ledger=ledger,
    )


def load_paths(dims: Dims, v_step: int, dtype: str) -> LoadPaths:
    """Return the kernel's load predicates as row limits; dtypes other than float16 read element by element."""
    if dtype != "float16":
        return LoadPaths(0, 0, 0, 0)
    last = dims.dv - (ceil_div(dims.dv, v_step) - 1) * v_step
    k_rows = q_rows = 0
    if dims.dk % FP16_PER_BLOCK == 0 and _strided_rows_ok(dims.dk, dims.hk * dims.dk):
        width = ceil_to(v_step, FP32_PER_BLOCK)
        k_rows = min(CHUNK, 2 * CHUNK * width // dims.dk)
        q_rows = min(CHUNK, CHUNK * width // dims.dk)
    v_rows = [int(_strided_rows_ok(n, dims.hv * dims.dv)) for n in (min(v_step, dims.dv), last)]
    return LoadPaths(k_rows, q_rows, v_rows[0], v_rows[1])


def _strided_rows_ok(n_columns: int, row_stride: int) -> bool:
    """Return whether one strided transfer can fetch fp16 rows of n_columns out of rows of row_stride elements."""
    row_bytes, gap_bytes = n_columns * FP16_BYTES, (row_stride - n_columns) * FP16_BYTES
    return (
        row_bytes % BLOCK_BYTES == 0 and gap_bytes % BLOCK_BYTES == 0 and gap_bytes // BLOCK_BYTES <= MAX_DMA_GAP_BLOCKS
    )


def workspace_stride(dims: Dims) -> int:
    """Return the floats of a workspace row: Dv rounded up to a data block."""
    return ceil_to(dims.dv, FP32_PER_BLOCK)


def workspace_bytes(dims: Dims) -> int:
    """Return the bytes of the FP32 workspace [N, Hv, Dk, ceil8(Dv)]."""
    return dims.n_sequences * dims.hv * dims.dk * workspace_stride(dims) * FP32_BYTES
