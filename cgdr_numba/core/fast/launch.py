"""The fast backend: a problem and its work items to one launch of a worker."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import FLOAT32, KINDS, as_words
from cgdr_numba.core.fast.step import rows_bytes
from cgdr_numba.core.fast.step_worker import StepFlags, StepKinds, walk_steps
from cgdr_numba.core.threads import numba_threads

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem
    from cgdr_numba.sched.steps import StepPlan


def run_steps(
    problem: "Problem", plan: "StepPlan", threads: int | None, out: NDArray[Any], final_state: NDArray[Any]
) -> None:
    """Run the recurrence over all tokens.

    Writes out [B, T, Hv, Dv] and, for sequences that have tokens, final_state, which is float32 in the layout of the
    caller's states with adjacent row elements; it may be the initial state itself.
    """
    state = problem.state if problem.state_v_first else problem.state.swapaxes(2, 3)
    is_direct = state.dtype == FLOAT32 and (state.strides[3] == 4 or state.shape[3] == 1)
    inputs = (problem.q, problem.k, problem.v, problem.g, problem.beta, state)
    arenas = memory.scratch(plan.n_bins, rows_bytes(problem.dims.dk, problem.dims.dv))
    # One bin runs without threads, and asking numba for its number would cost as much as a small call.
    with numba_threads(threads) if plan.n_bins > 1 else nullcontext():
        walk_steps(
            *(as_words(x) for x in inputs),
            state if is_direct else final_state,
            *problem.sequences,
            *plan,
            problem.dims,
            StepKinds(*(KINDS[x.dtype] for x in inputs[2:])),
            StepFlags(problem.normalise, problem.state_v_first, bool(is_direct)),
            np.float32(problem.scale),
            arenas,
            as_words(out),
            final_state,
        )
