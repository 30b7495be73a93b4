"""A plan of a call over a pool in words."""

from typing import TYPE_CHECKING

from cgdr_numba.core.dims import MAX_STEP_TOKENS
from cgdr_numba.sched.device import MAX_QUEUE_BUFFERS, RECURRENT_WORKSPACE_BYTES
from cgdr_numba.sched.pool_machine import dots_a_tile_token, head_counts, machine_steps, n_dot_groups, state_slot_bytes
from cgdr_numba.sched.profile import PROFILES, evaluate, queue_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgdr_numba.sched.pool_plan import PoolPlan

_SHOWN_STEPS = 14
"""Steps of the machine that are shown: two V tiles, and the third one's prefetch."""


def explain_pool(plan: "PoolPlan") -> str:
    """Return the text of a plan: launch, profiles, ledger, machine, counts, cores."""
    parts = (_launch_lines, _profile_lines, _ledger_lines, _machine_lines, _count_lines, _core_lines)
    return "\n\n".join("\n".join(part(plan)) for part in parts)


def _launch_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield what the host decides before the launch."""
    key, tiling = plan.key, plan.tiling
    dims, values = key.dims, plan.as_dict()
    yield values["revision"] + (" - extension: the NPU takes float16 only" if plan.extension else "")
    yield f"device {plan.device.name}: {plan.device.cores} cores, {plan.device.ub_bytes} bytes of UB a core"
    gates = " and ".join(
        [*(["g"] if key.gates.has_g else []), *([f"{key.gates.gk} gk"] if key.gates.gk != "none" else [])]
    )
    yield (
        f"T {dims.n_tokens} in {dims.n_sequences} sequences of at most {MAX_STEP_TOKENS}, Hk {dims.hk}, Hv {dims.hv}, "
        f"Dk {dims.dk}, Dv {dims.dv}, {key.dtype}, pool {key.state_dtype}, {gates or 'no gates'}"
    )
    yield f"v_step {tiling.v_step}: {tiling.n_v_tiles} V tile(s) a head; block_dim {plan.block_dim}"
    yield f"the NPU asks for {RECURRENT_WORKSPACE_BYTES} bytes of workspace and leaves them alone"


def _profile_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield what becomes of every candidate for the depths of the output queues (states, outputs)."""
    dims, gates = plan.key.dims, plan.key.gates
    for profile in PROFILES:
        buffers = queue_buffers(gates, profile)
        found = evaluate(dims, gates, profile, plan.device.ub_bytes)
        if buffers > MAX_QUEUE_BUFFERS:
            fate = f"unreachable, there are {MAX_QUEUE_BUFFERS}"
        elif found is None:
            fate = "no V tile fits"
        else:
            fate = f"v_step {found.v_step}, {found.n_v_tiles} V tile(s)"
        chosen = "  <- taken" if profile == plan.tiling.profile else ""
        if chosen and found is not None and found.v_step != plan.tiling.v_step:
            chosen += f", with the v_step of {plan.tiling.v_step} that was asked for"
        yield f"profile {profile}: {buffers} queue buffers: {fate}{chosen}"


def _ledger_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield the map of the UB and the host's estimates."""
    yield str(plan.ledger)
    tiling = plan.tiling
    yield f"host's estimate: fixed {tiling.fixed_bytes}, working {tiling.working_bytes}, rest {tiling.rest_bytes}"


def _machine_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield the table of the machine that prefetches states."""
    steps = list(machine_steps(plan.tiling.n_v_tiles))
    yield f"{'step':>4}  {'action':<32} {'queue slot':<14} {'UB copy':<17} {'queue':<5}"
    for i, step in enumerate(steps[:_SHOWN_STEPS]):
        yield f"{i:>4}  {step.action:<32} {step.queue_slot:<14} {step.ub_copy:<17} {step.queue:<5}".rstrip()
    if len(steps) > _SHOWN_STEPS:
        yield f" ...  and so on to step {len(steps) - 1}, tile {plan.tiling.n_v_tiles - 1}"
    slot = state_slot_bytes(plan.key.dims, plan.tiling.v_step)
    yield f"a queue slot holds {slot} bytes, the UB copy {plan.ledger['state'].n_bytes}"


def _count_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield what a head of the longest sequence costs."""
    dims, tiling, n_tokens = plan.key.dims, plan.tiling, plan.most_tokens
    counts = head_counts(n_tokens, dims, tiling)
    yield f"a head of {n_tokens} token(s):"
    yield (
        f"  {counts.dots} dots, {dots_a_tile_token(dims, tiling.v_step)} a token and full V tile, each of "
        f"{n_dot_groups(dims)} group(s) of 64"
    )
    yield f"  {counts.state_reads} state transfer(s) in, {counts.hidden_reads} of them while another tile is computed"
    yield (
        f"  {counts.writes} transfers out: {counts.state_writes} state rows of {counts.state_write_bytes} bytes and "
        f"{counts.attn_writes} output(s), {counts.hidden_attn_writes} of these behind the next token"
    )
    yield f"  {counts.store_barriers} barriers behind transfers out, {counts.load_barriers} before transfers in"


def _core_lines(plan: "PoolPlan") -> "Iterator[str]":
    """Yield every core's heads."""
    for core in plan.as_dict()["bins"]:
        items = [f"({n}, {h})" for n, h in core["items"]]
        shown = ", ".join(items[:4]) + (f", ... ({len(items)})" if len(items) > 4 else "")
        yield f"core {core['bin']}: {core['tokens']} tokens, (sequence, head) {shown or 'none'}"
    yield f"balance: mean load / largest load over {plan.block_dim} cores = {plan.balance():.3f}"
