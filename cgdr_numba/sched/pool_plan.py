"""One plan of a call over a pool on the NPU: buffer profile, V tiles, UB pieces, heads dealt to cores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import MAX_STEP_TOKENS, Dims, GateForm, ceil_to
from cgdr_numba.core.schedule import PoolSchedule
from cgdr_numba.errors import BudgetError
from cgdr_numba.sched.device import (
    FP16_PER_BLOCK,
    MAX_RECURRENT_CORES,
    RECURRENT_WORKSPACE_BYTES,
    DeviceSpec,
    resolve,
)
from cgdr_numba.sched.items import DealtItems, deal_items
from cgdr_numba.sched.plan import KERNEL_DTYPE, PLANNED_DTYPES
from cgdr_numba.sched.pool_explain import explain_pool
from cgdr_numba.sched.pool_ledger import PoolLedger
from cgdr_numba.sched.pool_machine import head_counts
from cgdr_numba.sched.profile import StepTiling, at_width, reachable_profiles, search, search_at
from cgdr_numba.sched.sizes import checked_lengths

POOL_REVISION: Final = "310P RecurrentGatedDeltaRule, vector revision 96ea3f55 (PR !1140)"
"""The kernel that these plans and the faithful backend re-enact."""


class PoolKey(NamedTuple):
    """What a plan was made for; a call must match it to use the plan."""

    dims: Dims
    lengths: tuple[int, ...]
    """Tokens of each sequence; padding has none."""
    gates: GateForm
    dtype: str
    """Of query, key and value."""
    state_dtype: str
    """Of the pool."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlan:
    """How a call over a pool runs on a device: queue depths, V tiles, UB pieces, heads dealt to cores."""

    key: PoolKey
    device: DeviceSpec
    tiling: StepTiling
    ledger: PoolLedger
    work: DealtItems
    """Items (sequence, value head), core after core."""

    @property
    def block_dim(self) -> int:
        """Cores that start."""
        return len(self.work.ptr) - 1

    @property
    def extension(self) -> bool:
        """Whether a dtype is one that the NPU's kernel does not take."""
        return (self.key.dtype, self.key.state_dtype) != (KERNEL_DTYPE, KERNEL_DTYPE)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.key.lengths, default=0)

    def schedule(self) -> PoolSchedule:
        """Return the plan in the form that crosses into kernels."""
        gates, profile = self.key.gates, self.tiling.profile
        return PoolSchedule(
            v_step=self.tiling.v_step,
            n_v_tiles=self.tiling.n_v_tiles,
            state_depth=profile.state_out,
            attn_depth=profile.attn_out,
            has_g=gates.has_g,
            has_scalar_gk=gates.gk == "scalar",
            has_vector_gk=gates.gk == "vector",
        )

    def check_fits(self, op: str) -> None:
        """Raise BudgetError where the NPU's scratch would run past its part of the UB."""
        if self.ledger.overflow_bytes:
            tiling = self.tiling
            raise BudgetError(
                f"{op}: `target`: V tiles of {tiling.v_step} columns need {self.ledger.scratch_bytes} bytes of scratch "
                f"where the host code leaves {tiling.rest_bytes}: the NPU would overflow its UB by "
                f"{self.ledger.overflow_bytes} bytes unseen\n{self.ledger}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``cgdr plan --json`` prints them."""
        key, tiling, ledger = self.key, self.tiling, self.ledger
        tokens = [key.lengths[n] for n in self.work.items[:, 0]]
        return {
            "operator": "npu_recurrent_gated_delta_rule",
            "backend": "faithful",
            "revision": POOL_REVISION,
            "device": {"name": self.device.name, "cores": self.device.cores, "ub_bytes": self.device.ub_bytes},
            "dims": key.dims._asdict(),
            "lengths": list(key.lengths),
            "gates": key.gates._asdict(),
            "dtype": key.dtype,
            "state_dtype": key.state_dtype,
            "extension": self.extension,
            "profile": tiling.profile._asdict(),
            "v_step": tiling.v_step,
            "n_v_tiles": tiling.n_v_tiles,
            "block_dim": self.block_dim,
            "fixed_bytes": tiling.fixed_bytes,
            "working_bytes": tiling.working_bytes,
            "rest_bytes": tiling.rest_bytes,
            "queue_bytes": ledger.queue_bytes,
            "scratch_bytes": ledger.scratch_bytes,
            "overflow_bytes": ledger.overflow_bytes,
            "npu_workspace_bytes": RECURRENT_WORKSPACE_BYTES,
            "ub": [
                {"name": s.name, "npu_name": s.npu_name, "offset": s.offset, "bytes": s.n_bytes}
                for s in (*ledger.queues, *ledger.scratch)
            ],
            "a_head": head_counts(self.most_tokens, key.dims, tiling)._asdict(),
            "bins": [
                {"bin": b, "tokens": sum(tokens[begin:end]), "items": self.work.items[begin:end].tolist()}
                for b, (begin, end) in enumerate(zip(self.work.ptr[:-1], self.work.ptr[1:], strict=True))
            ],
        }

    def balance(self) -> float:
        """Return mean load / largest load over the cores that start; 1 is perfect."""
        loads = [core["tokens"] for core in self.as_dict()["bins"]]
        return sum(loads) / (max(loads) * len(loads)) if any(loads) else 1.0

    def explain(self) -> str:
        """Return the plan in words: launch, ledger, the prefetch's machine, counts, cores."""
        return explain_pool(self)


def plan_step(
    dims: Dims,
    lengths: Sequence[int],
    *,
    g: bool = True,
    gk: Literal["none", "scalar", "vector"] = "none",
    dtype: str = KERNEL_DTYPE,
    state_dtype: str | None = None,
    target: str | DeviceSpec | None = None,
    v_step: int | None = None,
) -> PoolPlan:
    """Plan a call over a pool for the NPU: dims and lengths to queue depths, V tiles, UB pieces and heads a core.

    Args:
        dims: Sizes of the call; n_tokens must be the lengths' sum or more (padding), n_sequences their number.
        lengths: Tokens of each sequence [N], at most 8; 0 for padding.
        g: Whether there is a log decay a token and value head.
        gk: Second log decay: "none" (default), "scalar" ([T, Hv], dropped where there is a g) or "vector"
            ([T, Hv, Dk]).
        dtype: Name of query's dtype; other names than "float16" are an extension to the NPU's kernel.
        state_dtype: Name of the pool's dtype; None means that of query.
        target: "310p" (default), "host" or a DeviceSpec.
        v_step: Columns of a V tile, to plan for another width than the host's choice.

    Returns:
        The plan, which ``plan=`` of `npu_recurrent_gated_delta_rule` takes for any call on faithful of these sizes,
        gates and dtypes. Where the NPU's scratch would overflow, `plan.ledger.overflow_bytes` says by how much.

    Raises:
        ContractError: Sizes or options that do not fit together.
        BudgetError: The host's own search finds nothing that fits the UB.

    Example:
        >>> dims = Dims(n_tokens=1, n_sequences=1, hk=16, hv=32, dk=128, dv=128)
        >>> plan = plan_step(dims, [1])
        >>> str(plan.tiling.profile), plan.tiling.v_step, plan.block_dim, plan.ledger.overflow_bytes
        ('{1,2}', 128, 8, 0)
        >>> plan_step(dims._replace(dv=160), [1]).ledger.overflow_bytes > 0
        True
    """
    checks = Checks("plan_step")
    gates = GateForm(checks.flag("g", g), checks.choice("gk", gk, ("none", "scalar", "vector")))  # type: ignore[arg-type]
    state = dtype if state_dtype is None else state_dtype
    for name, value in (("dtype", dtype), ("state_dtype", state)):
        checks.choice(name, value, PLANNED_DTYPES)
    sizes = checked_lengths("plan_step", dims, lengths, padded=True)
    check_step_lengths(checks, "lengths", sizes)
    if gates.gk == "scalar":
        gates = gates._replace(gk="vector" if dims.dk == 1 else "none" if gates.has_g else "scalar")
    return make_pool_plan("plan_step", PoolKey(dims, sizes, gates, dtype, state), target=target, v_step=v_step)


def check_step_lengths(checks: Checks, name: str, lengths: Sequence[int]) -> None:
    """Refuse sequences that the kernel's eight rows of scratch do not hold."""
    longest = max(lengths, default=0)
    if longest > MAX_STEP_TOKENS:
        raise checks.error(
            f"`{name}` must be at most {MAX_STEP_TOKENS} tokens a sequence for the 310P's kernel, got {longest} for "
            f"sequence {list(lengths).index(longest)}"
        )


def make_pool_plan(op: str, key: PoolKey, *, target: object = None, v_step: object = None) -> PoolPlan:
    """Return the plan of checked sizes, for the public function `op`, whose name begins every message."""
    dims = key.dims
    device = resolve(target, "310p", op)
    tiling = _tiling(op, key, device, v_step)
    block_dim = max(1, min(dims.n_sequences * dims.hv, device.cores, MAX_RECURRENT_CORES))
    return PoolPlan(
        key=key,
        device=device,
        tiling=tiling,
        ledger=PoolLedger.for_step(dims, key.gates, tiling, device.ub_bytes),
        work=deal_items(key.lengths, dims.hv, block_dim),
    )


def _tiling(op: str, key: PoolKey, device: DeviceSpec, v_step: object) -> StepTiling:
    """Return the host's choice, or the deepest queues at the width that was asked for."""
    dims, gates, ub = key.dims, key.gates, device.ub_bytes
    if v_step is None:
        found = search(dims, gates, ub)
    else:
        found = search_at(dims, gates, _checked_width(op, dims, v_step), ub)
    if found is None or found.rest_bytes < 0:
        smallest = at_width(dims, gates, reachable_profiles(gates)[0], FP16_PER_BLOCK, ub)
        ledger = PoolLedger.for_step(dims, gates, smallest, ub)
        raise BudgetError(
            f"{op}: `target`: no V tile fits the UB of {device.name} by the host's estimate: even 16 columns of Dk = "
            f"{dims.dk} leave {smallest.rest_bytes} bytes for scratch of {ledger.scratch_bytes}\n{ledger}"
        )
    return found


def _checked_width(op: str, dims: Dims, v_step: object) -> int:
    """Return a V tile width that was asked for, after its check."""
    widest = ceil_to(dims.dv, FP16_PER_BLOCK)
    if (
        not isinstance(v_step, int)
        or isinstance(v_step, bool)
        or v_step % FP16_PER_BLOCK
        or not FP16_PER_BLOCK <= v_step <= widest
    ):
        raise Checks(op).error(
            f"`v_step` must be a multiple of {FP16_PER_BLOCK} from {FP16_PER_BLOCK} to {widest}, got {v_step!r}"
        )
    return v_step
