"""The fast backend: a problem and its work items to one launch of a worker."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import FLOAT32, KINDS, as_words, single
from cgdr_numba.core.fast.chunk_worker import FEW, ChunkArguments, ChunkKinds, walk_chunks
from cgdr_numba.core.fast.step import rows_bytes
from cgdr_numba.core.fast.step_worker import StepArguments, StepFlags, StepKinds, walk_steps
from cgdr_numba.core.served import noted, run_bins

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem
    from cgdr_numba.sched.host_plan import HostPlan
    from cgdr_numba.sched.steps import StepPlan

STREAMED_BYTES = 2**23
"""Results of the chunked form from this size on are written past the caches, which would lose them before their use."""
SHARED_STREAMED_BYTES = 2**20
"""The same where several bins write: cores that fetch ahead of their stores take lines from one another, which costs 7
% of a call with two heads; smaller results are worth more in a cache."""


class PreparedSteps:
    """Launches of one recurrent problem's shape: all that does not change between calls, and scratch."""

    def __init__(self, problem: "Problem", plan: "StepPlan", threads: int | None) -> None:
        state = problem.given_state
        self._is_direct = is_direct(state)
        # Words that no pass reads would keep the memory of a first state.
        self._state_words = as_words(np.empty((0, 0, 0, 0), FLOAT32) if self._is_direct else state)
        self._threads = threads
        self._n_bins = plan.n_bins
        kinds = StepKinds(*(KINDS[x.dtype] for x in (problem.q, problem.g, problem.beta, state)))
        flags = StepFlags(problem.normalise, problem.state_v_first, self._is_direct)
        self._fixed = (
            *problem.sequences,
            plan.items,
            plan.bin_ptr,
            problem.dims,
            kinds,
            flags,
            single(problem.scale),
            memory.scratch(plan.n_bins, rows_bytes(problem.dims.dk, problem.dims.dv)),
        )

    def run(self, arrays: tuple[NDArray[Any], ...], out: NDArray[Any]) -> None:
        """Run (q, k, v, g, beta, state) of the problem's shapes, the state in place; writes out."""
        q, k, v, g, beta, state = arrays
        self._launch((q, k, v, g, beta), state, out, state)

    def run_from(self, problem: "Problem", out: NDArray[Any], final_state: NDArray[Any]) -> None:
        """Run the problem itself; writes out and the final states of sequences that have tokens."""
        source = problem.given_state if self._is_direct else final_state
        self._launch((problem.q, problem.k, problem.v, problem.g, problem.beta), source, out, final_state)

    def keep(self, arrays: tuple[NDArray[Any], ...], out: NDArray[Any]) -> Callable[..., None] | None:
        """Return what runs q, k, v, g, beta, state, state, out of these strides at addresses; None without JIT."""
        q, k, v, g, beta, state = arrays
        kept = walk_steps.keep(self._arguments((q, k, v, g, beta), state, out, state))
        if kept is None:
            return None
        route, n_bins, threads = ("fast", "steps"), self._n_bins, self._threads
        if n_bins <= 1:
            return noted(kept.in_turn(n_bins), route, n_bins)
        return lambda *addresses: run_bins(kept, route, n_bins, threads, addresses)

    def _launch(
        self,
        inputs: tuple[NDArray[Any], ...],
        source: NDArray[Any],
        out: NDArray[Any],
        final_state: NDArray[Any],
    ) -> None:
        """Call the worker."""
        arguments = self._arguments(inputs, source, out, final_state)
        run_bins(walk_steps, ("fast", "steps"), self._n_bins, self._threads, arguments)

    def _arguments(
        self,
        inputs: tuple[NDArray[Any], ...],
        source: NDArray[Any],
        out: NDArray[Any],
        final_state: NDArray[Any],
    ) -> StepArguments:
        """Return what the worker takes."""
        q, k, v, g, beta = inputs
        words = (as_words(q), as_words(k), as_words(v), as_words(g), as_words(beta), self._state_words)
        return StepArguments._make((*words, source, *self._fixed, as_words(out), final_state))


def run_steps(
    problem: "Problem", plan: "StepPlan", threads: int | None, out: NDArray[Any], final_state: NDArray[Any]
) -> None:
    """Run the recurrence over all tokens.

    Writes out [B, T, Hv, Dv] and, for sequences that have tokens, final_state, which is float32 in the layout of the
    caller's states with adjacent row elements; it may be the initial state itself.
    """
    PreparedSteps(problem, plan, threads).run_from(problem, out, final_state)


def run_chunks(
    problem: "Problem", plan: "HostPlan", threads: int | None, out: NDArray[Any], final_state: NDArray[Any]
) -> None:
    """Run the chunked form over all tokens.

    Writes out [B, T, Hv, Dv] and, for sequences that have tokens, final_state, seen as [N, Hv, Dv, Dk].
    """
    given, final = problem.given_state, final_state if problem.state_v_first else final_state.swapaxes(2, 3)
    if max(problem.lengths, default=0) <= FEW and not problem.state_v_first and final.dtype == FLOAT32:
        # The token loop's bits are the same in the caller's states as in scratch that they are moved to.
        run_steps(problem, plan.steps, threads, out, final)
        return
    arguments = ChunkArguments(
        as_words(problem.q),
        as_words(problem.k),
        as_words(problem.v),
        as_words(problem.g),
        as_words(problem.beta),
        as_words(given),
        problem.sequences,
        plan.items,
        plan.bin_ptr,
        problem.dims,
        ChunkKinds(*(KINDS[x.dtype] for x in (problem.q, problem.g, problem.beta, given, final))),
        problem.normalise,
        out.nbytes >= (STREAMED_BYTES if plan.n_bins == 1 else SHARED_STREAMED_BYTES),
        problem.state_v_first,
        single(problem.scale),
        plan.width,
        plan.n_together,
        memory.scratch(plan.n_bins, plan.arena_bytes),
        as_words(out),
        as_words(final),
    )
    run_bins(walk_chunks, ("fast", "chunks"), plan.n_bins, threads, arguments)


def as_floats(states: NDArray[Any], is_read: bool) -> NDArray[Any]:
    """Return states [N, Hv, D1, D2] where a worker reads them as float32, else none of their elements."""
    return states if is_read else np.empty((*states.shape[:2], 0, 0), FLOAT32)


def is_direct(state: NDArray[Any]) -> bool:
    """Return whether passes may read initial states as they are: float32, adjacent elements in a row."""
    return bool(state.dtype == FLOAT32 and (state.strides[3] == 4 or state.shape[3] == 1))
