"""The fast backend over a pool of states: a problem and its work items to one launch of a worker."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import KINDS, as_words, single
from cgdr_numba.core.fast.channel_launch import ChannelInputs, ChannelStates, launch_channels
from cgdr_numba.core.fast.launch import as_floats, is_direct
from cgdr_numba.core.fast.pool_step import pool_bytes
from cgdr_numba.core.fast.pool_worker import PoolArguments, PoolKinds, walk_pool
from cgdr_numba.core.served import run_bins

if TYPE_CHECKING:
    from cgdr_numba.core.pool_contract import PoolProblem
    from cgdr_numba.sched.channels import ChannelPlan
    from cgdr_numba.sched.steps import StepPlan

Array = NDArray[Any]

CACHED_FLOATS: Final = 8192
"""Elements of a state that several tokens run over together, so that they stay in the first-level cache."""
BLOCK_ROWS: Final = 4
"""Rows that passes take together."""


def run_pool(problem: "PoolProblem", plan: "StepPlan", threads: int | None, out: Array) -> None:
    """Run the recurrence over all tokens where heads forget as a whole; writes out [T, Hv, Dv] and the pool."""
    dims, pool = problem.dims, problem.pool
    gates = problem.g if problem.gk is None else problem.gk
    takes_floats = is_direct(pool) and (pool.flags.c_contiguous or all(stride % 4 == 0 for stride in pool.strides))
    tile = max(CACHED_FLOATS // dims.dk // BLOCK_ROWS, 1) * BLOCK_ROWS
    n_states = 0 if takes_floats else dims.hv // dims.hk
    arguments = PoolArguments(
        as_words(problem.q),
        as_words(problem.k),
        as_words(problem.v),
        as_words(gates),
        as_words(problem.beta),
        problem.sequences,
        problem.read_slot,
        problem.write_slot,
        plan.items,
        plan.bin_ptr,
        dims,
        PoolKinds(*(KINDS[x.dtype] for x in (problem.q, gates, problem.beta, pool))),
        takes_floats,
        single(problem.scale),
        tile,
        memory.scratch(plan.n_bins, pool_bytes(dims.dk, dims.dv, n_states)),
        as_words(out),
        as_words(pool),
        as_floats(pool, takes_floats),
    )
    run_bins(walk_pool, ("fast", "pool"), plan.n_bins, threads, arguments)


def run_pool_channels(problem: "PoolProblem", plan: "ChannelPlan", threads: int | None, out: Array) -> None:
    """Run the recurrence over all tokens where channels forget one by one; writes out [T, Hv, Dv] and the pool."""
    assert problem.gk is not None, "the pool's channels have no gates"
    q, k, v, g, gk, beta = (
        x[np.newaxis] for x in (problem.q, problem.k, problem.v, problem.g, problem.gk, problem.beta)
    )
    states = ChannelStates(problem.pool, problem.pool, True, problem.read_slot, problem.write_slot[np.newaxis])
    call = (problem.dims, problem.sequences, False, problem.scale)
    launch_channels(ChannelInputs(q, k, v, g, gk, None, beta), states, call, plan, threads, out[np.newaxis])
