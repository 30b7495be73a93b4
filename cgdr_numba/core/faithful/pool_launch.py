"""The faithful backend over a pool: a problem and its plan to one launch of the worker."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import FLOAT32, KINDS, as_words, single
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.pool_ub import PoolKinds
from cgdr_numba.core.faithful.pool_worker import PoolArguments, PoolCall, walk_cores, walk_cores_optioned
from cgdr_numba.core.served import run_bins

if TYPE_CHECKING:
    from cgdr_numba.core.pool_contract import PoolProblem
    from cgdr_numba.sched.pool_plan import PoolPlan

_NO_GATES = np.zeros((0, 0, 0), FLOAT32)


def run(problem: "PoolProblem", plan: "PoolPlan", arith: Arith | None, threads: int | None, out: NDArray[Any]) -> None:
    """Re-enact the kernel on every item of the plan.

    Writes out [T, Hv, Dv] but for padding rows, and the pool.
    """
    gk = problem.gk
    if gk is None:
        gk = _NO_GATES
    elif gk.ndim == 2:
        gk = gk[..., np.newaxis]
    kinds = PoolKinds(*(KINDS[x.dtype] for x in (problem.q, problem.g, gk, problem.beta, problem.pool)))
    call = PoolCall(plan.schedule(), plan.ledger.layout(), problem.dims, kinds, single(problem.scale), arith)
    arguments = PoolArguments(
        as_words(problem.q),
        as_words(problem.k),
        as_words(problem.v),
        as_words(problem.g),
        as_words(gk),
        as_words(problem.beta),
        problem.sequences,
        problem.read_slot,
        problem.write_slot,
        plan.work.items,
        plan.work.ptr,
        call,
        memory.scratch(plan.block_dim, plan.ledger.total_bytes),
        as_words(out),
        as_words(problem.pool),
    )
    walk = walk_cores if arith is None else walk_cores_optioned
    run_bins(walk, ("faithful", "pool"), plan.block_dim, threads, arguments)
