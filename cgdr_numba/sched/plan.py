"""One plan of a call: the same plan gives the same launch, the same slices and the same order of work."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import CHUNK, Dims
from cgdr_numba.core.schedule import ChunkSchedule
from cgdr_numba.sched.bins import fill_bins
from cgdr_numba.sched.device import MIN_WORKSPACE_BYTES, DeviceSpec, resolve
from cgdr_numba.sched.explain import explain_chunk
from cgdr_numba.sched.host_plan import HostPlan, make_host_plan
from cgdr_numba.sched.items import chunk_items
from cgdr_numba.sched.sizes import MAX_LOAD, checked_lengths
from cgdr_numba.sched.tiling import (
    ChunkTiling,
    LoadPaths,
    load_paths,
    solve_tiling,
    workspace_bytes,
    workspace_stride,
)

REVISION = "310P ChunkGatedDeltaRule, vector revision 00e39ab5 (PR !1108)"
"""The kernel that plans and the faithful backend re-enact; later 310P code uses the matrix unit."""
KERNEL_DTYPE = "float16"
"""The only dtype of q, k and v that the NPU takes; other dtypes are an extension."""
PLANNED_DTYPES = (KERNEL_DTYPE, "bfloat16", "float32")
"""The dtypes of q, k and v that plans are made for."""
PLANNED_BACKENDS = ("faithful", "fast")
"""The backends that run by a plan; golden has none."""


class PlanKey(NamedTuple):
    """What a plan was made for; a call must match it to use the plan."""

    dims: Dims
    lengths: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a chunked call runs on a device: V tiles, UB slices, work items, bins."""

    key: PlanKey
    device: DeviceSpec
    tiling: ChunkTiling
    paths: LoadPaths
    items: NDArray[np.int64]
    """Work items [n, 3]: sequence, value head, V tile."""
    bin_ptr: NDArray[np.int64]
    """CSR pointers [n_bins + 1] into items."""

    @property
    def n_bins(self) -> int:
        """Bins that hold items; at most tiling.block_dim."""
        return len(self.bin_ptr) - 1

    @property
    def extension(self) -> bool:
        """Whether the dtype is one that the NPU's kernel does not take."""
        return self.key.dtype != KERNEL_DTYPE

    @property
    def n_rows(self) -> int:
        """Rows of the largest chunk: min(64, longest sequence)."""
        return min(CHUNK, max(self.key.lengths, default=0))

    @property
    def carries_state(self) -> bool:
        """Whether some sequence has several chunks, so that the workspace is used at all."""
        return max(self.key.lengths, default=0) > CHUNK

    def for_lengths(self, lengths: tuple[int, ...]) -> "Plan":
        """Return the same tiling with items and bins for other lengths of the sequences."""
        dims = self.key.dims._replace(n_tokens=sum(lengths), n_sequences=len(lengths))
        items = chunk_items(lengths, dims, self.tiling.n_v_tiles, self.tiling.split)
        bin_ptr = fill_bins([lengths[n] for n in items[:, 0]], self.tiling.block_dim)
        return replace(self, key=self.key._replace(dims=dims, lengths=lengths), items=items, bin_ptr=bin_ptr)

    def schedule(self) -> ChunkSchedule:
        """Return the plan in the form that crosses into kernels."""
        tiling = self.tiling
        return ChunkSchedule(CHUNK, tiling.v_step, tiling.n_v_tiles, *self.paths)

    def workspace_shape(self) -> tuple[int, int, int, int]:
        """Return [N, Hv, Dk, ceil8(Dv)], or the smallest array where no sequence has a second chunk."""
        dims = self.key.dims
        if not self.carries_state:
            return 1, 1, 1, 1
        return dims.n_sequences, dims.hv, dims.dk, workspace_stride(dims)

    def bin_tokens(self) -> list[int]:
        """Return every bin's load: the tokens of its items together."""
        loads = np.array([self.key.lengths[n] for n in self.items[:, 0]], np.int64)
        return [int(loads[begin:end].sum()) for begin, end in zip(self.bin_ptr[:-1], self.bin_ptr[1:], strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``cgdr plan --json`` prints them."""
        tiling, dims = self.tiling, self.key.dims
        return {
            "operator": "chunk_gated_delta_rule",
            "backend": "faithful",
            "revision": REVISION,
            "device": {"name": self.device.name, "cores": self.device.cores, "ub_bytes": self.device.ub_bytes},
            "dims": dims._asdict(),
            "lengths": list(self.key.lengths),
            "dtype": self.key.dtype,
            "extension": self.extension,
            "rows": self.n_rows,
            "v_step": tiling.v_step,
            "n_v_tiles": tiling.n_v_tiles,
            "block_dim": tiling.block_dim,
            "split": tiling.split,
            "overlap": tiling.overlap,
            "q_cached": 0 < self.n_rows <= self.paths.q_cache_rows,
            "k_dma": 0 < self.n_rows <= self.paths.k_dma_rows,
            "tmp_bytes": tiling.ledger.tmp_bytes,
            "out_queue_bytes": tiling.ledger.out_queue_bytes,
            "free_bytes": tiling.ledger.free_bytes,
            "workspace_bytes": workspace_bytes(dims),
            "npu_workspace_bytes": max(workspace_bytes(dims), MIN_WORKSPACE_BYTES),
            "ub": [
                {"name": s.name, "npu_name": s.npu_name, "offset": s.offset, "bytes": s.n_bytes, "over": s.over}
                for s in tiling.ledger.slices
            ],
            "bins": [
                {"bin": b, "tokens": tokens, "items": self.items[self.bin_ptr[b] : self.bin_ptr[b + 1]].tolist()}
                for b, tokens in enumerate(self.bin_tokens())
            ],
        }

    def balance(self) -> float:
        """Return mean load / largest load over the cores that start; 1 is perfect."""
        tokens = self.bin_tokens()
        return sum(tokens) / (max(tokens) * self.tiling.block_dim) if tokens else 1.0

    def explain(self) -> str:
        """Return the plan in words: tiling, UB ledger, bins and their balance."""
        return explain_chunk(self)


@overload
def plan_chunk(
    dims: Dims,
    lengths: Sequence[int],
    *,
    backend: Literal["faithful"] = "faithful",
    dtype: str = KERNEL_DTYPE,
    target: str | DeviceSpec | None = None,
    v_step: int | None = None,
) -> Plan: ...
@overload
def plan_chunk(
    dims: Dims,
    lengths: Sequence[int],
    *,
    backend: Literal["fast"],
    dtype: str = KERNEL_DTYPE,
    target: str | DeviceSpec | None = None,
    threads: int | None = None,
) -> HostPlan: ...
def plan_chunk(
    dims: Dims,
    lengths: Sequence[int],
    *,
    backend: Literal["faithful", "fast"] = "faithful",
    dtype: str = KERNEL_DTYPE,
    target: str | DeviceSpec | None = None,
    v_step: int | None = None,
    threads: int | None = None,
) -> Plan | HostPlan:
    """Plan a chunked call: dims and lengths to V tiles that fit a core's fast memory, work items, and bins of them.

    Args:
        dims: Sizes of the call; n_tokens must be the lengths' sum, n_sequences their number.
        lengths: Tokens of each sequence [N].
        backend: "faithful" (default; a `Plan` under the UB budget) or "fast" (a `HostPlan` for threads).
        dtype: Name of q's dtype. Faithful: other names than "float16" are an extension to the NPU's kernel. Fast runs
            every one of them by the same plan.
        target: "310p" (faithful's default), "host" (fast's) or a DeviceSpec.
        v_step: Faithful only: columns of a V tile, to plan for another width than the widest that fits.
        threads: Fast only: bins at the most. None takes the cores of the target, or the number that a call takes
            by default where no target is given.

    Returns:
        The plan, which ``plan=`` of the public functions takes for any call on the backend of these dims and lengths,
        and of this dtype on faithful.

    Raises:
        ContractError: Sizes or options that do not fit together.
        BudgetError: Faithful: no V tile fits the UB; the message shows the ledger of the narrowest.

    Example:
        >>> dims = Dims(n_tokens=520, n_sequences=2, hk=16, hv=32, dk=128, dv=128)
        >>> plan = plan_chunk(dims, [512, 8])
        >>> plan.tiling.v_step, plan.n_bins, plan.bin_tokens()[0]
        (128, 7, 2560)
        >>> plan = plan_chunk(dims, [512, 8], backend="fast", threads=4)
        >>> plan.n_bins, plan.balance() > 0.9
        (4, True)
    """
    op = "plan_chunk"
    checks = Checks(op)
    if checks.choice("backend", backend, PLANNED_BACKENDS) == "faithful":
        if threads is not None:
            raise checks.error(f'`threads` must be left out with backend="faithful", got {threads!r}')
        return make_chunk_plan(op, dims, lengths, dtype=dtype, target=target, v_step=v_step)
    if v_step is not None:
        raise checks.error(f'`v_step` must be left out with backend="fast", got {v_step!r}')
    checks.choice("dtype", dtype, PLANNED_DTYPES)
    return make_host_plan(op, dims, lengths, target=target, threads=threads)


def make_chunk_plan(
    op: str,
    dims: Dims,
    lengths: object,
    *,
    dtype: str,
    target: object = None,
    v_step: object = None,
) -> Plan:
    """Return `plan_chunk`'s plan for faithful, for the public function `op`, whose name begins every message."""
    checks = Checks(op)
    sizes = checked_lengths(op, dims, lengths)
    if dtype not in PLANNED_DTYPES:
        raise checks.error(f"`dtype` must be one of {', '.join(PLANNED_DTYPES)}, got {dtype!r}")
    device = resolve(target, "310p", op)
    tiling = solve_tiling(dims, device, v_step, op)
    if dims.n_tokens * dims.hv * tiling.n_v_tiles > MAX_LOAD:
        raise checks.error(f"`lengths` must sum to at most 2^62 / (Hv * V tiles), got {dims.n_tokens}")
    items = chunk_items(sizes, dims, tiling.n_v_tiles, tiling.split)
    return Plan(
        key=PlanKey(dims, sizes, dtype),
        device=device,
        tiling=tiling,
        paths=load_paths(dims, tiling.v_step, dtype),
        items=items,
        bin_ptr=fill_bins([sizes[n] for n in items[:, 0]], tiling.block_dim),
    )
