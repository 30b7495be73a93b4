"""RGDR's host side: every worked row of the kernel's description, every figure of the machine's, heads on cores."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cgdr_numba import ASCEND_310P, BudgetError, ContractError, DeviceSpec, Dims, DtypeError, plan_step
from cgdr_numba.core.dims import GateForm
from cgdr_numba.sched.device import RECURRENT_WORKSPACE_BYTES
from cgdr_numba.sched.items import deal_items
from cgdr_numba.sched.pool_ledger import PoolLedger
from cgdr_numba.sched.profile import PROFILES, Profile, evaluate, queue_buffers, reachable_profiles, search
from pool_plans import UB_310P, UB_910B, G, plan_of, sizes

# ub, (Nv, Dk, Dv), gates, profile, v_step, tiles, fixed, working, rest, scratch
WORKED = [
    (UB_310P, (32, 128, 128), G, (1, 2), 128, 1, 6784, 21120, 189312, 145920),
    (UB_310P, (32, 128, 128), GateForm(True, "vector"), (1, 1), 128, 1, 10880, 25216, 185472, 145920),
    (UB_310P, (32, 128, 128), GateForm(False, "scalar"), (1, 2), 128, 1, 7808, 21120, 188288, 145920),
    (UB_310P, (64, 64, 512), GateForm(True, "vector"), (1, 1), 256, 2, 13440, 38016, 182656, 156672),
    (UB_310P, (8, 256, 256), G, (1, 2), 64, 4, 12672, 38272, 183680, 156416),
    (UB_310P, (8, 128, 160), G, (1, 2), 160, 1, 7040, 21376, 172544, 178304),
    (UB_310P, (8, 512, 512), G, (1, 2), 32, 16, 24960, 75136, 171520, 180864),
    (UB_910B, (32, 128, 128), G, (1, 2), 128, 1, 6784, 21120, 123776, 145920),
]


@pytest.mark.parametrize("row", WORKED, ids=lambda row: f"{row[0]}-{row[1]}-{row[2].gk}")
def test_worked_rows(row: Any) -> None:
    ub, shape, gates, profile, v_step, n_tiles, fixed, working, rest, scratch = row
    plan = plan_of(sizes(*shape), gates, target=replace(ASCEND_310P, ub_bytes=ub))
    tiling = plan.tiling
    assert (tiling.profile, tiling.v_step, tiling.n_v_tiles) == (profile, v_step, n_tiles)
    assert (tiling.fixed_bytes, tiling.working_bytes, tiling.rest_bytes) == (fixed, working, rest)
    assert plan.ledger.scratch_bytes == scratch
    assert plan.ledger.overflow_bytes == max(0, scratch - rest)
    if scratch > rest:
        assert f"OVERFLOW: the scratch runs {scratch - rest} bytes past" in plan.explain()
        with pytest.raises(BudgetError, match=rf"^op: .* the NPU would overflow its UB by {scratch - rest} bytes"):
            plan.check_fits("op")
    else:
        assert "OVERFLOW" not in plan.explain()
        plan.check_fits("op")


@pytest.mark.parametrize(
    ("hv", "gates", "overflowing"),
    [
        (16, G, 386),
        (8, G, 383),
        (32, G, 384),
        (64, G, 395),
        (16, GateForm(True, "vector"), 417),
        (16, GateForm(False, "scalar"), 393),
    ],
)
def test_how_many_shapes_overflow_unseen(hv: int, gates: GateForm, overflowing: int) -> None:
    count, shallow = 0, 0
    for dk in range(16, 513, 16):
        for dv in range(16, 513, 16):
            dims = sizes(hv, dk, dv)
            tiling = search(dims, gates, UB_310P)
            assert tiling is not None
            count += PoolLedger.for_step(dims, gates, tiling, UB_310P).overflow_bytes > 0
            shallow += tiling.profile == Profile(1, 1)
    assert count == overflowing
    if (hv, gates) == (16, G):
        assert shallow == 3, "shapes where fewer V tiles beat the deeper queue"


@pytest.mark.parametrize(
    ("dk", "dv", "overflows"),
    [(128, dv, dv in (160, 176)) for dv in (128, 160, 176, 256)]
    + [(64, dv, dv >= 320) for dv in (64, 320, 336, 352)]
    + [(256, dv, False) for dv in (128, 176, 192, 256)]
    + [(512, 512, True)],
)
def test_shapes_that_overflow_unseen(dk: int, dv: int, overflows: bool) -> None:
    assert (plan_of(sizes(16, dk, dv), G).ledger.overflow_bytes > 0) is overflows


def test_the_search_passes_up_to_dk_992() -> None:
    """With 128 columns of values; with 16 of them a block more."""
    for dv, most in ((128, 992), (16, 1008)):
        assert search(sizes(16, most, dv), G, UB_310P) is not None
        assert search(sizes(16, most + 16, dv), G, UB_310P) is None
    with pytest.raises(BudgetError, match=r"no V tile fits the UB of 310p .*Dk = 1008") as caught:
        plan_of(sizes(16, 1008, 128), G)
    assert "state_queue" in str(caught.value), "the ledger follows"


def test_profile_2_2_is_unreachable_and_a_vector_gk_leaves_only_1_1() -> None:
    assert [queue_buffers(G, profile) for profile in PROFILES] == [7, 8, 9]
    assert [queue_buffers(GateForm(True, "vector"), profile) for profile in PROFILES] == [8, 9, 10]
    assert reachable_profiles(G) == reachable_profiles(GateForm(False, "scalar")) == (Profile(1, 1), Profile(1, 2))
    assert reachable_profiles(GateForm(False, "vector")) == (Profile(1, 1),)
    # The limit of 8 buffers shuts {2,2} out, and no shortage of UB: by bytes alone it would fit.
    assert evaluate(sizes(32, 128, 128), G, Profile(2, 2), UB_310P) is not None
    assert "profile {2,2}: 9 queue buffers: unreachable, there are 8" in plan_of(sizes(32, 128, 128), G).explain()


def test_depths_are_not_almost_always_1() -> None:
    assert plan_of(sizes(32, 128, 128), G).tiling.profile == Profile(state_out=1, attn_out=2)


def test_heads_are_dealt_round_robin() -> None:
    work = deal_items([1, 0, 3], 3, 4)
    # Units 0 to 8 in turn; those of sequence 1, units 3 to 5, have no tokens.
    assert work.ptr.tolist() == [0, 2, 3, 5, 6]
    assert work.items.tolist() == [[0, 0], [2, 2], [0, 1], [0, 2], [2, 0], [2, 1]]
    for core in range(4):
        items = work.items[work.ptr[core] : work.ptr[core + 1]]
        assert all((n * 3 + h) % 4 == core for n, h in items.tolist())
        assert items.tolist() == sorted(items.tolist()), "sequences, then heads"
    nothing = deal_items([0, 0], 2, 4)
    assert nothing.ptr.tolist() == [0] * 5


@pytest.mark.parametrize(("n", "hv", "cores", "block_dim"), [(1, 2, 8, 2), (4, 2, 8, 8), (4, 32, 3, 3), (9, 9, 40, 8)])
def test_block_dim(n: int, hv: int, cores: int, block_dim: int) -> None:
    dims = sizes(hv, 16, 16, lengths=(1,) * n)
    plan = plan_of(dims, G, target=DeviceSpec("x", cores, UB_310P))
    assert plan.block_dim == block_dim
    assert sum(core["tokens"] for core in plan.as_dict()["bins"]) == n * hv


def test_no_sequences_start_one_core() -> None:
    plan = plan_step(sizes(2, 16, 16, lengths=()), [])
    assert plan.block_dim == 1
    assert plan.balance() == 1.0
    assert "none" in plan.explain()


def test_the_plan_as_data() -> None:
    plan = plan_step(Dims(9, 2, 2, 4, 64, 80), [1, 8], gk="vector", dtype="float32", state_dtype="float16")
    values = plan.as_dict()
    assert values["operator"] == "npu_recurrent_gated_delta_rule"
    assert values["revision"].startswith("310P RecurrentGatedDeltaRule, vector revision 96ea3f55")
    assert values["extension"] is True
    assert values["gates"] == {"has_g": True, "gk": "vector"}
    assert values["profile"] == {"state_out": 1, "attn_out": 1}
    assert values["npu_workspace_bytes"] == RECURRENT_WORKSPACE_BYTES == 16 * 2**20
    assert values["a_head"]["dots"] == 2 * 8 * 80
    pieces = values["ub"]
    for piece, following in pairwise(pieces):
        assert piece["offset"] + piece["bytes"] == following["offset"], "one piece after another"
    assert plan_step(Dims(1, 1, 1, 1, 16, 16), [1]).extension is False


def test_queues_and_rest_fill_the_ub_but_for_the_reserve() -> None:
    for gates in (G, GateForm(True, "vector")):
        plan = plan_of(sizes(32, 128, 128), gates)
        assert plan.ledger.queue_bytes + plan.tiling.rest_bytes == UB_310P - 128


def test_heads_that_fill_no_block() -> None:
    """24 betas and gates take 32 floats where the kernel rounds up to 16 of them, and 24 where it does not."""
    both = plan_of(sizes(3, 16, 16), G).ledger
    assert (both["beta"].n_bytes, both["g"].n_bytes) == (32 * 4, 24 * 4)
    scalar = plan_of(sizes(3, 16, 16), GateForm(False, "scalar")).ledger
    assert (scalar["beta"].n_bytes, scalar["gk"].n_bytes) == (32 * 4, 24 * 4)
    assert both.scratch_bytes == scalar.scratch_bytes


def test_gates_that_the_kernel_rewrites() -> None:
    assert plan_step(sizes(2, 16, 16), [1], gk="scalar").key.gates == (True, "none"), "dropped beside g"
    assert plan_step(sizes(2, 16, 16), [1], g=False, gk="scalar").key.gates == (False, "scalar")
    assert plan_step(sizes(2, 1, 16), [1], gk="scalar").key.gates == (True, "vector"), "told apart by elements"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lengths": [9]},
            r"`lengths` must be at most 8 tokens a sequence for the 310P's kernel, got 9 for sequence 0",
        ),
        ({"lengths": [4, 6]}, r"`lengths` must be \[N\] = \[1\] lengths of at least 0 with a sum of at most T = 9"),
        ({"lengths": [10]}, r"with a sum of at most T = 9, got \[10\] with the sum 10"),
        ({"gk": "both"}, r"`gk` must be \"none\" or \"scalar\" or \"vector\", got 'both'"),
        ({"g": 1}, r"`g` must be True or False, got 1"),
        ({"dtype": "float64"}, r"`dtype` must be .*, got 'float64'"),
        ({"state_dtype": "int8"}, r"`state_dtype` must be .*, got 'int8'"),
        ({"v_step": 24}, r"`v_step` must be a multiple of 16 from 16 to 32, got 24"),
        ({"v_step": 48}, r"`v_step` must be a multiple of 16 from 16 to 32, got 48"),
        ({"v_step": True}, r"`v_step` must be a multiple of 16 from 16 to 32, got True"),
        ({"target": "910b"}, r"`target` must be .* \(the 910B's kernel is another one\)"),
    ],
)
def test_faults(options: dict[str, Any], message: str) -> None:
    given = {"lengths": [8], **options}
    with pytest.raises(ContractError, match="^plan_step: .*" + message):
        plan_step(Dims(9, 1, 1, 2, 16, 20), **given)


def test_dims_have_to_be_dims() -> None:
    with pytest.raises(DtypeError, match="`dims` must be Dims, got tuple"):
        plan_step((1, 1, 1, 1, 16, 16), [1])  # type: ignore[arg-type]


def test_a_width_that_the_estimate_refuses() -> None:
    with pytest.raises(BudgetError, match="no V tile fits"):
        plan_of(sizes(16, 512, 512), G, v_step=512)
    assert plan_of(sizes(16, 512, 512), G, v_step=16).ledger.overflow_bytes == 0, "narrower tiles do fit"
