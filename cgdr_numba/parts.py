"""Long calls in parts: Python handles signals only between calls of compiled code, so Ctrl-C would wait for the end.

Bits are those of the call in one go: parts end at multiples of 64 tokens, and the states go on in float32. So the size
of a part may follow the clock.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import FLOAT32, FLOAT64, round_to
from cgdr_numba.core.faithful import launch as faithful
from cgdr_numba.core.fast import channel_launch as channels
from cgdr_numba.core.fast import launch as fast
from cgdr_numba.sched.channels import plan_channels
from cgdr_numba.sched.device import host_cache_bytes
from cgdr_numba.sched.host_plan import plan_host
from cgdr_numba.sched.parts import next_lengths, tokens_of
from cgdr_numba.sched.steps import plan_steps

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem
    from cgdr_numba.core.faithful.arith import Arith
    from cgdr_numba.sched.host_plan import HostPlan
    from cgdr_numba.sched.plan import Plan

Array = NDArray[Any]

CHUNKS_FLOPS = 2e10
"""Work that the fast chunked form does in one go: 0.1 s on one core with AVX-512, some times that elsewhere."""
STEPS_FLOPS = 1e10
"""The same for the token loop."""
CHANNELS_FLOPS = 6e9
"""The same for the token loop whose channels or columns forget by themselves."""
FAITHFUL_FLOPS = 8e9
"""The same for faithful."""
PART_SECONDS = 0.3
"""How long a part should take; the first one is sized by half of the work above."""


def run_chunks(problem: "Problem", plan: "HostPlan", threads: int | None, out: Array, final_state: Array) -> None:
    """Run fast's chunked form; writes as `core.fast.launch.run_chunks` does."""
    if problem.dims.n_tokens <= tokens_of(CHUNKS_FLOPS, problem.dims):
        fast.run_chunks(problem, plan, threads, out, final_state)
        return

    def run(part: "Problem", states: Array) -> None:
        made = plan_host(part.dims, part.lengths, plan.n_threads, plan.cache_bytes)
        fast.run_chunks(part, made, threads, out, states)

    _run_parts(problem, CHUNKS_FLOPS, run, final_state, _rounded)


def run_tokens(problem: "Problem", n_bins: int, threads: int | None, out: Array, final_state: Array) -> None:
    """Run fast's token loop in at most n_bins bins: the plain one, or the one with decays of channels or columns.

    Writes as `core.fast.launch.run_steps` does; final_state is in the caller's layout.
    """
    loop, flops = _steps, STEPS_FLOPS
    if problem.gk is not None or problem.gv is not None:
        loop, flops = _channels, CHANNELS_FLOPS
    if problem.dims.n_tokens <= tokens_of(flops, problem.dims):
        loop(problem, n_bins, threads, out, final_state)
        return

    def run(part: "Problem", states: Array) -> None:
        loop(part, n_bins, threads, out, states if part.state_v_first else states.swapaxes(2, 3))

    seen = final_state if problem.state_v_first else final_state.swapaxes(2, 3)
    _run_parts(problem, flops, run, seen, _rounded)


def _steps(problem: "Problem", n_bins: int, threads: int | None, out: Array, final_state: Array) -> None:
    """Plan and run the plain token loop in one go."""
    plan = plan_steps(problem.dims, problem.lengths, n_bins)
    fast.run_steps(problem, plan, threads, out, final_state)


def _channels(problem: "Problem", n_bins: int, threads: int | None, out: Array, final_state: Array) -> None:
    """Plan and run the token loop with decays of channels or columns in one go."""
    plan = plan_channels(problem.dims, problem.lengths, n_bins, host_cache_bytes())
    channels.run_channels(problem, plan, threads, out, final_state)


def run_faithful(
    problem: "Problem", plan: "Plan", arith: "Arith | None", threads: int | None, out: Array, final_state: Array
) -> None:
    """Run faithful; writes as `core.faithful.launch.run` does."""
    problem = faithful.normalised(problem)
    if problem.dims.n_tokens <= tokens_of(FAITHFUL_FLOPS, problem.dims):
        faithful.run(problem, plan, arith, threads, out, final_state)
        return

    def run(part: "Problem", states: Array) -> None:
        faithful.run(part, plan.for_lengths(part.lengths), arith, threads, out, states)

    def cast(states: Array, dtype: np.dtype[Any]) -> Array:
        return faithful.cast_states(states, dtype, arith)

    _run_parts(problem, FAITHFUL_FLOPS, run, final_state, cast)


def _rounded(states: Array, dtype: np.dtype[Any]) -> Array:
    """Return float32 states in the dtype of the results."""
    return round_to(states.astype(FLOAT64), dtype)


def _run_parts(
    problem: "Problem",
    flops: float,
    run: Callable[["Problem", Array], None],
    final_state: Array,
    cast: Callable[[Array, np.dtype[Any]], Array],
) -> None:
    """Call run(part, states) until all tokens are done; states, seen as [N, Hv, Dv, Dk], are both read and written.

    Sequences without tokens get no state, as in one go.
    """
    _, start, length = problem.sequences
    is_carried = final_state.dtype == FLOAT32
    states = final_state if is_carried else memory.empty(final_state.shape, FLOAT32)
    with np.errstate(all="ignore"):
        states[...] = problem.state
    done = np.zeros_like(length)
    n_tokens = tokens_of(flops / 2, problem.dims)
    while np.any(done < length):
        lengths = next_lengths(length - done, n_tokens)
        dims = problem.dims._replace(n_tokens=int(lengths.sum()))
        sequences = problem.sequences._replace(start=start + done, length=lengths)
        begin = time.perf_counter()
        run(replace(problem, dims=dims, sequences=sequences, state=states), states)
        seconds = max(time.perf_counter() - begin, 1e-6)
        n_tokens = max(1, int(dims.n_tokens * min(4.0, PART_SECONDS / seconds)))
        done += lengths
    if not is_carried:
        with np.errstate(all="ignore"):
            final_state[length > 0] = cast(states[length > 0], final_state.dtype)
