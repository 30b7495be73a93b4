"""The unified buffer's ledger: which slice lies where, how large, over which other one."""

from dataclasses import dataclass
from typing import Self

from cgdr_numba.core.dims import CHUNK, Dims, ceil_to
from cgdr_numba.core.schedule import UbLayout
from cgdr_numba.sched.device import FP16_PER_BLOCK, FP32_PER_BLOCK

FP16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class UbSlice:
    """One named piece of the unified buffer."""

    name: str
    """Our name of the slice."""
    npu_name: str
    """The kernel's name of it."""
    shape: tuple[int, ...]
    """Rows and columns, in elements."""
    offset: int
    """First byte, from the start of the UB."""
    n_bytes: int
    """Bytes reserved."""
    over: str | None = None
    """The slice whose bytes this one takes over, if it has none of its own."""

    @property
    def end(self) -> int:
        """First byte behind the slice."""
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class UbLedger:
    """Every slice of one core's UB: the output queue first, then the temporary buffer's slices in kernel order."""

    slices: tuple[UbSlice, ...]
    ub_bytes: int
    out_queue_bytes: int
    tmp_bytes: int

    @classmethod
    def for_chunk(cls, dims: Dims, v_step: int, overlap: bool, ub_bytes: int) -> Self:
        """Lay out CGDR's slices for V tiles of `v_step` columns.

        With `overlap` the state tile lies over the scores (A is dead by then); without, it has bytes of its own.
        """
        align_k, state_rows = ceil_to(dims.dk, FP16_PER_BLOCK), ceil_to(dims.dk, FP32_PER_BLOCK)
        width = ceil_to(v_step, FP32_PER_BLOCK)
        out_queue_bytes = max(state_rows, CHUNK) * width * FP16_BYTES
        scores = state_rows * width if overlap and state_rows * width > CHUNK * CHUNK else CHUNK * CHUNK
        rows: list[tuple[str, str, tuple[int, ...], int, str | None]] = [
            ("k", "chunkKFp32", (CHUNK, align_k), CHUNK * align_k, None),
            ("k_beta", "kCumdecayFp32", (CHUNK, align_k), CHUNK * align_k, None),
            ("decay", "decayMaskFp32", (CHUNK, CHUNK), CHUNK * CHUNK, None),
            ("v", "chunkVFp32", (CHUNK, width), CHUNK * width, None),
            ("scores", "chunkScoresFp32", (CHUNK, CHUNK), scores, None),
            ("state", "stateInFp32", (state_rows, width), state_rows * width, "scores" if overlap else None),
            ("attn_out", "chunkAttnOutFp32", (CHUNK, width), CHUNK * width, None),
            ("g_cum", "gCumsumFp32", (CHUNK,), CHUNK, None),
            ("delta", "deltaFp32", (max(state_rows, CHUNK, width),), max(state_rows, CHUNK, width), None),
            ("dot", "dotProductFp32", (max(state_rows, CHUNK),), max(state_rows, CHUNK), None),
            ("exp_g", "expGCumFp32", (CHUNK,), CHUNK, None),
        ]
        slices = [UbSlice("out_queue", "stateOutQueue_", (max(state_rows, CHUNK), width), 0, out_queue_bytes)]
        cursor = out_queue_bytes
        starts: dict[str, int] = {}
        for name, npu_name, shape, size, over in rows:
            starts[name] = starts[over] if over else cursor
            slices.append(UbSlice(name, npu_name, shape, starts[name], size * FP32_BYTES, over))
            cursor += 0 if over else size * FP32_BYTES
        return cls(tuple(slices), ub_bytes, out_queue_bytes, cursor - out_queue_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the slices and the queue take together."""
        return self.out_queue_bytes + self.tmp_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the UB that stay unused; negative where the plan does not fit."""
        return self.ub_bytes - self.total_bytes

    def layout(self) -> UbLayout:
        """Return the ledger in the form that crosses into kernels."""
        starts = {piece.name: piece.offset // FP32_BYTES for piece in self.slices}
        state_rows, width = self["state"].shape
        return UbLayout(
            **starts,
            align_k=self["k"].shape[1],
            state_rows=state_rows,
            width=width,
            delta_size=self["delta"].shape[0],
            dot_size=self["dot"].shape[0],
        )

    def __getitem__(self, name: str) -> UbSlice:
        """Return the slice of that name."""
        for piece in self.slices:
            if piece.name == name:
                return piece
        raise KeyError(name)

    def __str__(self) -> str:
        """The ledger as a table, one slice a line."""
        lines = [f"{'slice':<10} {'kernel name':<17} {'shape':<11} {'offset':>8} {'bytes':>8}"]
        for piece in self.slices:
            shape = "x".join(map(str, piece.shape))
            over = f"  over {piece.over}" if piece.over else ""
            lines.append(
                f"{piece.name:<10} {piece.npu_name:<17} {shape:<11} {piece.offset:>8} {piece.n_bytes:>8}{over}"
            )
        lines.append(
            f"sum {self.total_bytes} = queue {self.out_queue_bytes} + tmp {self.tmp_bytes}; "
            f"UB {self.ub_bytes}; free {self.free_bytes}"
        )
        return "\n".join(lines)
