"""RGDR's host tiling: how deep the output queues are, and the V tile width that follows, by the host's own estimate."""

from typing import Final, NamedTuple

from cgdr_numba.core.dims import MAX_STEP_TOKENS, Dims, GateForm, ceil_div, ceil_to
from cgdr_numba.sched.device import FP16_PER_BLOCK, MAX_QUEUE_BUFFERS
from cgdr_numba.sched.ledger import FP16_BYTES, FP32_BYTES

_RESERVE_BYTES: Final = 128


class Profile(NamedTuple):
    """Buffers of the two output queues."""

    state_out: int
    """Depth of the queue of states."""
    attn_out: int
    """Depth of the queue of outputs."""

    def __str__(self) -> str:
        """The profile as the host code writes it."""
        return f"{{{self.state_out},{self.attn_out}}}"


PROFILES: Final = (Profile(1, 1), Profile(1, 2), Profile(2, 2))
"""Candidates in the host's order."""


class StepTiling(NamedTuple):
    """What the host decides about the unified buffer of a call over a pool."""

    profile: Profile
    v_step: int
    """Columns of a V tile, a multiple of 16."""
    n_v_tiles: int
    """V tiles of a head."""
    fixed_bytes: int
    """What the host sets aside whatever the V tile: queues of q, k, v, beta and gk."""
    working_bytes: int
    """The same with the scratch that does not depend on the V tile."""
    rest_bytes: int
    """What is left for scratch after the queues; negative where the host refuses."""


def fixed_bytes(dims: Dims, gates: GateForm) -> int:
    """Return the bytes that the host sets aside first, whatever the V tile."""
    heads, wide, key = (ceil_to(n, FP16_PER_BLOCK) for n in (dims.hv, dims.dv, dims.dk))
    gk = {"none": 0, "scalar": heads, "vector": key}[gates.gk] * FP32_BYTES
    return MAX_STEP_TOKENS * ((2 * key + wide + heads) * FP16_BYTES + gk) + _RESERVE_BYTES


def working_bytes(dims: Dims, gates: GateForm) -> int:
    """Return `fixed_bytes` and the float32 copies of q, k, v, beta and g."""
    heads, wide, key = (ceil_to(n, FP16_PER_BLOCK) for n in (dims.hv, dims.dv, dims.dk))
    floats = 2 * key + wide + heads + (heads if gates.has_g else 0)
    return fixed_bytes(dims, gates) + MAX_STEP_TOKENS * floats * FP32_BYTES


def column_bytes(dims: Dims, profile: Profile) -> int:
    """Return the bytes that the host counts for a column of a V tile.

    State and product in float32, the output queues, and an output. The fp16 queue that states come in through is left
    out: that is the host's mistake, by which its V tiles can be too wide for the scratch.
    """
    key = ceil_to(dims.dk, FP16_PER_BLOCK)
    queues = (profile.state_out * key + profile.attn_out) * FP16_BYTES
    return queues + (2 * key + 1) * FP32_BYTES


def queue_buffers(gates: GateForm, profile: Profile) -> int:
    """Return how many queue buffers a call has: q, k, v, the state, beta, a vector gk, and the output queues'."""
    return (6 if gates.gk == "vector" else 5) + profile.state_out + profile.attn_out


def evaluate(dims: Dims, gates: GateForm, profile: Profile, ub_bytes: int) -> StepTiling | None:
    """Return the tiling that a profile leads to; None where not even 16 columns fit the host's estimate."""
    left = ub_bytes - working_bytes(dims, gates)
    widest = left // column_bytes(dims, profile) // FP16_PER_BLOCK * FP16_PER_BLOCK
    if widest < FP16_PER_BLOCK:
        return None
    n_v_tiles = ceil_div(dims.dv, widest)
    return at_width(dims, gates, profile, ceil_to(ceil_div(dims.dv, n_v_tiles), FP16_PER_BLOCK), ub_bytes)


def at_width(dims: Dims, gates: GateForm, profile: Profile, v_step: int, ub_bytes: int) -> StepTiling:
    """Return the tiling of a profile with V tiles of v_step columns."""
    key, fixed = ceil_to(dims.dk, FP16_PER_BLOCK), fixed_bytes(dims, gates)
    queued = ((1 + profile.state_out) * key + profile.attn_out) * FP16_BYTES
    return StepTiling(
        profile=profile,
        v_step=v_step,
        n_v_tiles=ceil_div(dims.dv, v_step),
        fixed_bytes=fixed,
        working_bytes=working_bytes(dims, gates),
        rest_bytes=ub_bytes - fixed - queued * v_step,
    )


def reachable_profiles(gates: GateForm) -> tuple[Profile, ...]:
    """Return the candidates that the queue buffers allow, in the host's order."""
    return tuple(profile for profile in PROFILES if queue_buffers(gates, profile) <= MAX_QUEUE_BUFFERS)


def search(dims: Dims, gates: GateForm, ub_bytes: int) -> StepTiling | None:
    """Return the host's choice: fewest V tiles, most output buffers, the widest tile; None where none fits."""
    best: StepTiling | None = None
    for profile in reachable_profiles(gates):
        found = evaluate(dims, gates, profile, ub_bytes)
        if found is not None and (best is None or _rank(found) > _rank(best)):
            best = found
    return best


def search_at(dims: Dims, gates: GateForm, v_step: int, ub_bytes: int) -> StepTiling | None:
    """Return the tiling with V tiles of v_step columns and the deepest queues that fit the host's estimate."""
    left = ub_bytes - working_bytes(dims, gates)
    fitting = [p for p in reachable_profiles(gates) if column_bytes(dims, p) * v_step <= left]
    return at_width(dims, gates, fitting[-1], v_step, ub_bytes) if fitting else None


def _rank(tiling: StepTiling) -> tuple[int, int, int]:
    """Return what the host prefers tilings by, the larger the better."""
    return -tiling.n_v_tiles, sum(tiling.profile), tiling.v_step
