"""Kernels compute in the ledger's slices: moving one of them by a single block spoils the result."""

from dataclasses import replace

import numpy as np
import pytest

from cgdr_numba import ASCEND_310P, Plan, plan_chunk
from cgdr_numba.core.dims import Dims
from cgdr_numba.sched.ledger import UbLedger
from judge import run_cann, same_bits
from reference import Case, make_case

pytestmark = pytest.mark.slow

HV, T, DK, DV = 8, 130, 64, 32
"""Two V tiles of 16 that one item walks, every row of Q formed anew: all slices are in use, none lies over another."""
SLICES = ["k", "k_beta", "decay", "v", "scores", "state", "attn_out", "g_cum", "delta", "dot", "exp_g"]


@pytest.fixture(scope="module")
def case() -> Case:
    """Mild gates, so that every row of a chunk still counts at its end."""
    return make_case(0, t=T, heads=(1, HV), dims=(DK, DV), g=-0.01, dtype=np.float16)


def planned(**changes: int) -> Plan:
    """The plan with some slices moved to other offsets."""
    plan = plan_chunk(Dims(T, 1, 1, HV, DK, DV), [T], v_step=16)
    assert not plan.tiling.overlap
    assert not plan.tiling.split
    assert plan.paths.q_cache_rows < 64
    slices = tuple(replace(s, offset=s.offset + changes.get(s.name, 0)) for s in plan.tiling.ledger.slices)
    return replace(plan, tiling=replace(plan.tiling, ledger=replace(plan.tiling.ledger, slices=slices)))


def spoiled(case: Case, plan: Plan, reference: Plan) -> bool:
    actual, expected = run_cann(case, "faithful", plan=plan), run_cann(case, "faithful", plan=reference)
    return not (same_bits(actual.out, expected.out) and same_bits(actual.state, expected.state))


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_one_block_too_early_overwrites_its_neighbour(case: Case, name: str) -> None:
    assert spoiled(case, planned(**{name: -32}), planned())


def test_slices_moved_together_change_nothing(case: Case) -> None:
    """The check above sees wrong neighbours, not mere movement."""
    moved = planned(**dict.fromkeys(SLICES, 32))
    room = replace(moved.tiling.ledger, tmp_bytes=moved.tiling.ledger.tmp_bytes + 32)
    assert not spoiled(case, replace(moved, tiling=replace(moved.tiling, ledger=room)), planned())


def test_state_over_scores_needs_a_single_use_of_the_scores(case: Case) -> None:
    """With several tiles walked by one item A is read again; the overlap rule keeps the state off it."""
    plan = planned()
    scores = plan.tiling.ledger["scores"].offset
    assert spoiled(case, planned(state=scores - plan.tiling.ledger["state"].offset), plan)


def test_the_overlap_rule_keeps_results(case: Case) -> None:
    """Few heads: every tile is an item, the state lies over the scores, and the bits are those of separate slices."""
    few = make_case(1, t=T, heads=(1, 2), dims=(DK, DV), dtype=np.float16)
    plans = [
        plan_chunk(Dims(T, 1, 1, 2, DK, DV), [T], v_step=16, target=replace(ASCEND_310P, cores=cores))
        for cores in (8, 1)
    ]
    assert [plan.tiling.overlap for plan in plans] == [True, False]
    assert isinstance(plans[0].tiling.ledger, UbLedger)
    assert not spoiled(few, *plans)
