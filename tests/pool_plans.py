"""Plans of calls over a pool, as tests ask for them."""

from typing import Any

from cgdr_numba import Dims, PoolPlan, plan_step
from cgdr_numba.core.dims import GateForm

G = GateForm(True, "none")
UB_310P, UB_910B = 262144, 196608


def sizes(hv: int, dk: int, dv: int, hk: int = 1, lengths: tuple[int, ...] = (1,)) -> Dims:
    """Dims of a call."""
    return Dims(sum(lengths), len(lengths), hk, hv, dk, dv)


def plan_of(dims: Dims, gates: GateForm, **options: Any) -> PoolPlan:
    """The plan of a call of one token a sequence."""
    return plan_step(dims, [1] * dims.n_sequences, g=gates.has_g, gk=gates.gk, **options)
