"""The fast backend where channels or columns forget by themselves: a problem and its work items to one launch."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import KINDS, as_words, single
from cgdr_numba.core.fast.channel_worker import ChannelArguments, ChannelCuts, ChannelFlags, ChannelKinds, walk_channels
from cgdr_numba.core.fast.launch import as_floats, is_direct
from cgdr_numba.core.served import run_bins

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem
    from cgdr_numba.sched.channels import ChannelPlan

Array = NDArray[Any]

CACHED_TILE: Final = 64
"""Columns of a state that many tokens run over together, so that they stay in the first-level cache."""
FEW_TOKENS: Final = 4
"""Tokens up to which whole rows of a state are crossed instead."""


class ChannelInputs(NamedTuple):
    """Tensors with a batch and a token axis."""

    q: Array
    k: Array
    v: Array
    g: Array
    gk: Array | None
    gv: Array | None
    beta: Array


class ChannelStates(NamedTuple):
    """Where states come from and go to."""

    initial: Array
    """[slots, Hv, D1, D2]"""
    final: Array
    """[slots, Hv, D1, D2]; may be the initial states."""
    is_v_first: bool
    read_slot: NDArray[np.int64]
    """[N]; initial state of each sequence."""
    write_slot: NDArray[np.int64]
    """[B, T]; final state that the state after each token is."""


def run_channels(
    problem: "Problem", plan: "ChannelPlan", threads: int | None, out: NDArray[Any], final_state: NDArray[Any]
) -> None:
    """Run the recurrence with decays of channels or of columns over all tokens.

    Writes out [B, T, Hv, Dv] and, for sequences that have tokens, final_state in the layout of the caller's states; it
    may be the initial state itself.
    """
    slots = np.arange(problem.dims.n_sequences)
    write_slot = np.zeros(problem.q.shape[:2], np.int64)
    for n, (row, start, length) in enumerate(zip(*problem.sequences, strict=True)):
        write_slot[row, start : start + length] = n
    inputs = ChannelInputs(problem.q, problem.k, problem.v, problem.g, problem.gk, problem.gv, problem.beta)
    states = ChannelStates(problem.given_state, final_state, problem.state_v_first, slots, write_slot)
    launch_channels(
        inputs, states, (problem.dims, problem.sequences, problem.normalise, problem.scale), plan, threads, out
    )


def launch_channels(
    inputs: ChannelInputs, states: ChannelStates, call: Any, plan: "ChannelPlan", threads: int | None, out: Array
) -> None:
    """Call the worker; `call` is (dims, sequences, normalise, scale)."""
    dims, sequences, normalise, scale = call
    # What is not given is never read.
    gk = inputs.k if inputs.gk is None else inputs.gk
    gv = inputs.v if inputs.gv is None else inputs.gv
    typed = (inputs.q, inputs.g, gk, gv, inputs.beta, states.initial, states.final)
    tile = CACHED_TILE if sequences.length.max(initial=0) > FEW_TOKENS else plan.width
    takes_floats = not states.is_v_first and is_direct(states.initial) and is_direct(states.final)
    arguments = ChannelArguments(
        as_words(inputs.q),
        as_words(inputs.k),
        as_words(inputs.v),
        as_words(inputs.g),
        as_words(gk),
        as_words(gv),
        as_words(inputs.beta),
        as_words(states.initial),
        as_floats(states.initial, takes_floats),
        states.read_slot,
        states.write_slot,
        sequences,
        plan.items,
        plan.bin_ptr,
        dims,
        ChannelKinds(*(KINDS[x.dtype] for x in typed)),
        ChannelFlags(
            normalise,
            states.is_v_first,
            not _is_zero(inputs.g),
            inputs.gk is not None,
            inputs.gv is not None,
            takes_floats,
        ),
        ChannelCuts(plan.n_together, plan.width, min(tile, plan.width)),
        single(scale),
        memory.scratch(plan.n_bins, plan.arena_bytes),
        as_words(out),
        as_words(states.final),
        as_floats(states.final, takes_floats),
    )
    run_bins(walk_channels, ("fast", "channels"), plan.n_bins, threads, arguments)


def _is_zero(gates: NDArray[Any]) -> bool:
    """Return whether gates are one zero for all, as where none are given: a decay of 1 changes no bit."""
    return gates.size > 0 and not any(gates.strides) and float(gates.flat[0]) == 0.0
