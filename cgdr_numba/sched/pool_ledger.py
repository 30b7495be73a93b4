"""The unified buffer's ledger of a call over a pool: queues, scratch slices, and how far the scratch overflows."""

from dataclasses import dataclass
from typing import Self

from cgdr_numba.core.dims import MAX_STEP_TOKENS, Dims, GateForm, ceil_to
from cgdr_numba.core.schedule import PoolLayout
from cgdr_numba.sched.device import FP16_PER_BLOCK, FP32_PER_BLOCK
from cgdr_numba.sched.ledger import FP16_BYTES, FP32_BYTES, UbSlice
from cgdr_numba.sched.profile import StepTiling


@dataclass(frozen=True, slots=True)
class PoolLedger:
    """Every piece of one core's UB: the queues first, then the scratch's slices in kernel order."""

    queues: tuple[UbSlice, ...]
    scratch: tuple[UbSlice, ...]
    ub_bytes: int
    rest_bytes: int
    """What the host leaves for the scratch."""

    @classmethod
    def for_step(cls, dims: Dims, gates: GateForm, tiling: StepTiling, ub_bytes: int) -> Self:
        """Lay out RGDR's queues and slices for a tiling."""
        tokens, width = MAX_STEP_TOKENS, tiling.v_step
        key, wide = ceil_to(dims.dk, FP16_PER_BLOCK), ceil_to(dims.dv, FP16_PER_BLOCK)
        heads = tokens * dims.hv
        queues: list[tuple[str, str, tuple[int, ...], int]] = [
            ("q_queue", "", (tokens, key), FP16_BYTES),
            ("k_queue", "", (tokens, key), FP16_BYTES),
            ("v_queue", "", (tokens, wide), FP16_BYTES),
            ("state_queue", "stateInQueue_", (width, key), FP16_BYTES),
            ("beta_queue", "", (tokens, dims.hv), FP16_BYTES),
            ("state_out", "", (tiling.profile.state_out, width, key), FP16_BYTES),
            ("attn_out", "", (tiling.profile.attn_out, width), FP16_BYTES),
        ]
        if gates.gk == "vector":
            queues.insert(4, ("gk", "gamaKInUb", (tokens, key), FP32_BYTES))
        scratch: list[tuple[str, str, tuple[int, ...], int]] = [
            ("attn", "", (width,), FP32_BYTES),
            ("v", "vInUb", (tokens, wide), FP32_BYTES),
            ("q", "", (tokens, key), FP32_BYTES),
            ("k", "kInUb", (tokens, key), FP32_BYTES),
            ("state", "stateInUb", (width, key), FP32_BYTES),
            ("product", "", (width, key), FP32_BYTES),
            ("beta", "", (ceil_to(heads, FP16_PER_BLOCK),), FP32_BYTES),
        ]
        if gates.has_g:
            scratch.append(("g", "", (heads,), FP32_BYTES))
        if gates.gk == "scalar":
            scratch.append(("gk", "", (ceil_to(heads, FP32_PER_BLOCK),), FP32_BYTES))
        placed = _place(queues, 0)
        return cls(placed, _place(scratch, placed[-1].end), ub_bytes, tiling.rest_bytes)

    @property
    def queue_bytes(self) -> int:
        """Bytes of the queues' buffers."""
        return sum(piece.n_bytes for piece in self.queues)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the scratch's slices need."""
        return sum(piece.n_bytes for piece in self.scratch)

    @property
    def total_bytes(self) -> int:
        """Bytes of queues and slices together."""
        return self.queue_bytes + self.scratch_bytes

    @property
    def overflow_bytes(self) -> int:
        """Bytes by which the slices run past what the host leaves for them, unseen by the NPU; 0 where they fit."""
        return max(0, self.scratch_bytes - self.rest_bytes)

    def layout(self) -> PoolLayout:
        """Return the ledger in the form that crosses into kernels; what a call does not have begins at 0."""
        starts = {piece.name: piece.offset // FP32_BYTES for piece in (*self.queues, *self.scratch)}
        names = [name for name in PoolLayout._fields if name not in ("align_k", "align_v")]
        return PoolLayout(
            **{name: starts.get(name, 0) for name in names}, align_k=self["q"].shape[1], align_v=self["v"].shape[1]
        )

    def __getitem__(self, name: str) -> UbSlice:
        """Return the queue or slice of that name."""
        for piece in (*self.queues, *self.scratch):
            if piece.name == name:
                return piece
        raise KeyError(name)

    def __str__(self) -> str:
        """The ledger as a table, one piece a line."""
        lines = [f"{'piece':<12} {'kernel name':<13} {'shape':<11} {'offset':>8} {'bytes':>8}"]
        for piece in (*self.queues, *self.scratch):
            shape = "x".join(map(str, piece.shape))
            lines.append(f"{piece.name:<12} {piece.npu_name:<13} {shape:<11} {piece.offset:>8} {piece.n_bytes:>8}")
        lines.append(
            f"queues {self.queue_bytes}, scratch {self.scratch_bytes} of the {self.rest_bytes} that the host leaves "
            f"(UB {self.ub_bytes})"
        )
        if self.overflow_bytes:
            lines.append(
                f"OVERFLOW: the scratch runs {self.overflow_bytes} bytes past its part of the UB, unseen by the NPU"
            )
        return "\n".join(lines)


def _place(pieces: list[tuple[str, str, tuple[int, ...], int]], begin: int) -> tuple[UbSlice, ...]:
    """Return (name, kernel's name, shape, bytes of an element) as slices one after another."""
    placed = []
    for name, npu_name, shape, element_bytes in pieces:
        n_bytes = element_bytes
        for n in shape:
            n_bytes *= n
        placed.append(UbSlice(name, npu_name, shape, begin, n_bytes))
        begin += n_bytes
    return tuple(placed)
