"""The faithful backend: a problem and its plan to one launch of the worker."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import BF16, BF16_MAX, F32_MAX, FP16, HALF_MAX, KINDS, as_words, round_to, single
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.ub import Kinds
from cgdr_numba.core.faithful.worker import Arguments, Call, walk_bins, walk_bins_optioned
from cgdr_numba.core.l2norm import l2norm
from cgdr_numba.core.served import run_bins

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem
    from cgdr_numba.sched.plan import Plan


def normalised(problem: "Problem") -> "Problem":
    """Return the problem with q and k as the kernel takes them: l2-normalised before, where that is asked for."""
    if not problem.normalise:
        return problem
    q, k = (l2norm(x, np.float32).astype(x.dtype) for x in (problem.q, problem.k))
    return replace(problem, q=q, k=k, normalise=False)


def cast_states(states: NDArray[Any], dtype: np.dtype[Any], arith: Arith | None) -> NDArray[Any]:
    """Return float32 states in `dtype`, as the kernel's cast of a final state gives them."""
    if arith is not None and arith.saturate:
        limit = {FP16: HALF_MAX, BF16: BF16_MAX}.get(KINDS[dtype], F32_MAX)
        states = np.clip(np.where(np.isnan(states), np.float32(0.0), states), -limit, limit)
    return round_to(states.astype(np.float64), dtype)


def run(
    problem: "Problem",
    plan: "Plan",
    arith: Arith | None,
    threads: int | None,
    out: NDArray[Any],
    final_state: NDArray[Any],
) -> None:
    """Re-enact the kernel on every item of the plan.

    Writes out [B, T, Hv, Dv] and the final states [N, Hv, Dv, Dk] of sequences that have tokens.
    """
    problem = normalised(problem)
    kinds = Kinds(*(KINDS[x.dtype] for x in (problem.q, problem.g, problem.beta, problem.state, final_state)))
    arenas, workspace = memory.allocate(plan.n_bins, plan.tiling.ledger.total_bytes, plan.workspace_shape())
    call = Call(plan.schedule(), plan.tiling.ledger.layout(), problem.dims, kinds, single(problem.scale), arith)
    arguments = Arguments(
        as_words(problem.q),
        as_words(problem.k),
        as_words(problem.v),
        as_words(problem.g),
        as_words(problem.beta),
        as_words(problem.state),
        problem.sequences,
        plan.items,
        plan.bin_ptr,
        call,
        arenas,
        workspace,
        as_words(out),
        as_words(final_state),
    )
    walk = walk_bins if arith is None else walk_bins_optioned
    run_bins(walk, ("faithful", "chunks"), plan.n_bins, threads, arguments)
