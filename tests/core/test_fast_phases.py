"""The table of what fast makes of the kernel's phases, against the kernel's table and the code."""

import importlib
from collections import Counter

import pytest

from cgdr_numba import chunk_gated_delta_rule
from cgdr_numba.core.dims import CHUNK, FAST_CHUNK
from cgdr_numba.core.fast import chunk_worker, phases_k, phases_v
from cgdr_numba.core.fast.decay import HIGHEST_RISE, LOWEST_FACTOR
from cgdr_numba.core.phases import CHUNK_PHASES, FAST_NEVER_FORMS, FAST_PHASES, FastPhase

FUSED = {"run_head", "finish_columns", "is_near", "move_bounds"}
"""Functions that are several steps of the table, or decide whether they count."""
ORDER = {phase.name: i for i, phase in enumerate(FAST_PHASES)}


@pytest.mark.parametrize("phase", FAST_PHASES, ids=lambda phase: phase.name)
def test_steps_are_functions_that_the_worker_or_a_phase_calls(phase: FastPhase) -> None:
    function = getattr(importlib.import_module(f"cgdr_numba.core.fast.{phase.module}"), phase.name)
    assert callable(function)
    callers = (chunk_worker, phases_v)
    assert any(value is function for module in callers for value in vars(module).values())


def test_every_phase_of_the_kernel_ends_in_one_step_or_is_never_formed() -> None:
    told = Counter([*(name for phase in FAST_PHASES for name in phase.covers), *FAST_NEVER_FORMS])
    assert told == Counter(phase.name for phase in CHUNK_PHASES)


def test_what_a_step_begins_a_later_one_ends() -> None:
    ends = {name: ORDER[phase.name] for phase in FAST_PHASES for name in phase.covers}
    begun = [(ORDER[phase.name], ends[name]) for phase in FAST_PHASES for name in phase.begins]
    assert begun
    assert all(begin < end for begin, end in begun)
    assert all(phase.covers or phase.begins for phase in FAST_PHASES)


def test_the_table_has_every_phase_function() -> None:
    for module in (phases_k, phases_v):
        defined = {
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(getattr(value, "py_func", value), "__module__", "") == module.__name__
        }
        name = module.__name__.rpartition(".")[2]
        assert defined - FUSED == {phase.name for phase in FAST_PHASES if phase.module == name}


def test_the_docstring_has_the_constants_of_the_code() -> None:
    told = " ".join((chunk_gated_delta_rule.__doc__ or "").split())
    for part in (
        f"in chunks of {FAST_CHUNK} tokens",
        f"where a chunk's sums stay within {-LOWEST_FACTOR:.0f},",
        f"last chunk has up to {chunk_worker.FEW} tokens",
        f"rise by more than e^{HIGHEST_RISE:.0f}",
        f"at multiples of {CHUNK} tokens",
    ):
        assert part in told
