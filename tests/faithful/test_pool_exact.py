"""The faithful step against an independent emulation of the kernel: every bit of out and pool."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cgdr_numba import PoolPlan, plan_step
from cgdr_numba.sched.pool_ledger import PoolLedger
from cgdr_numba.sched.profile import Profile, at_width
from pool_cases import DTYPES, PoolCase, PoolResult, make_pool_case, run, same
from pool_emulation import emulate_recurrent

GATES = ("", "g", "scalar", "vector", "g vector")
slow = pytest.mark.slow


def emulated(case: PoolCase, overflow: str = "ieee") -> PoolResult:
    """Out and pool of the kernel's emulation."""
    tensors = {name: getattr(case, name) for name in ("query", "key", "value", "state", "beta", "g", "gk", "accepted")}
    scale = 1.0 if case.scale is None else case.scale
    return PoolResult(
        *emulate_recurrent(**tensors, lengths=case.lengths, slots=case.slots, scale=scale, overflow=overflow)
    )


def plan_for(case: PoolCase, v_step: int | None = None, profile: Profile | None = None) -> PoolPlan:
    """A plan of other V tiles, or of other queue depths, than the host's choice."""
    second = "none" if case.gk is None else "scalar" if case.gk.ndim == 2 else "vector"
    dtypes = {"dtype": case.query.dtype.name, "state_dtype": case.state.dtype.name}
    plan = plan_step(case.dims, case.lengths, g=case.g is not None, gk=second, v_step=v_step, **dtypes)
    if profile is None:
        return plan
    dims, gates, ub = case.dims, plan.key.gates, plan.device.ub_bytes
    tiling = at_width(dims, gates, profile, plan.tiling.v_step, ub)
    return replace(plan, tiling=tiling, ledger=PoolLedger.for_step(dims, gates, tiling, ub))


def assert_emulated(case: PoolCase, overflow: str = "ieee", **options: Any) -> PoolResult:
    """Faithful has the emulation's bits; gives them."""
    expected = emulated(case, overflow)
    same(run(case, "faithful", overflow=overflow, **options), expected)
    return expected


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("length", range(1, 9))
def test_lengths_and_accepted_counts(length: int, gates: str) -> None:
    """L = 1 .. 8 with every accepted count, side by side in one call: sequences see nothing of one another."""
    case = make_pool_case(length, (length,) * length, heads=(1, 1), dims=(16, 17), gates=gates, dtype=np.float16)
    assert_emulated(case.but(accepted=range(1, length + 1)))


@slow
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dk", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_widths_of_keys_over_several_tiles(dk: int, gates: str, dtype: Any) -> None:
    dv = 80 if dk < 256 else 64  # at 256 a tile of 80 columns overflows the NPU's UB
    case = make_pool_case(dk, (3, 8), heads=(2, 4), dims=(dk, dv), gates=gates, accepted=True, dtype=dtype)
    expected = assert_emulated(case)
    for v_step in (16, 32, 48):
        same(run(case, "faithful", plan=plan_for(case, v_step)), expected)


@pytest.mark.parametrize("dk", [1, 3, 17, 20, 63])
def test_widths_off_the_grid(dk: int) -> None:
    """No round-up stores and no neighbours in dots: lanes behind Dk are zeros."""
    for gates in ("g", "g vector"):
        assert_emulated(make_pool_case(dk, (2, 1), dims=(dk, 5), gates=gates))


@slow
@pytest.mark.parametrize("dk", [65, 80, 100, 127, 130, 200])
def test_wider_widths_off_the_grid(dk: int) -> None:
    for gates in ("g", "g vector"):
        assert_emulated(make_pool_case(dk, (2, 5), dims=(dk, 35), gates=gates, dtype=np.float16))


@pytest.mark.parametrize("profile", [Profile(1, 1), Profile(1, 2), Profile(2, 2), Profile(2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_queue_depths_change_nothing(profile: Profile, dtype: Any) -> None:
    """{2,2} and {2,1} too, which the host never reaches."""
    for gates in ("g", "vector"):
        case = make_pool_case(22, (1, 4), dims=(16, 40), gates=gates, accepted=True, dtype=dtype)
        same(run(case, "faithful", plan=plan_for(case, 16, profile)), emulated(case))


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (2, 6), (3, 3), (2, 16)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    assert_emulated(make_pool_case(3, (2, 1, 3), heads=heads, gates="g", dtype=np.float16))


@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_tensors_and_pool(dtype: Any, state: Any) -> None:
    case = make_pool_case(5, (2, 3), dims=(20, 24), gates="g vector", dtype=dtype, state=state)
    assert_emulated(case)
    halves = case.but(g=case.g.astype(np.float16), gk=case.gk.astype(np.float64), beta=case.beta.astype(np.float64))
    assert_emulated(halves)


def test_slots_named_twice_keep_the_last_tokens_state() -> None:
    case = make_pool_case(6, (4, 3), gates="g", dtype=np.float16)
    assert_emulated(case.but(slots=[1, 1, 1, 1, 5, 6, 5], accepted=[3, 2]))


def test_padding_and_empty_sequences() -> None:
    case = make_pool_case(7, (2, 0, 2, 1), gates="g", dtype=np.float16)
    slots = [*case.slots[:2], -1, -1, case.slots[4]]
    expected = assert_emulated(case.but(slots=slots))
    assert not expected.out[2:4].any()
    assert expected.out[4].any()


@pytest.mark.parametrize("scale", [None, 1, 0.1, 3.5, -2.0, 0.0, np.inf])
def test_scales(scale: float | None) -> None:
    assert_emulated(make_pool_case(8, (2,), gates="g", dtype=np.float16).but(scale=scale))


EXTREMES = [-np.inf, np.nan, 65504.0, -65504.0, 6e-8, -0.0]


@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
@pytest.mark.parametrize("value", [np.inf, *(pytest.param(x, marks=slow) for x in EXTREMES)])
def test_numbers_at_the_ends(value: float, overflow: str) -> None:
    """One extreme number in every tensor in turn, under both answers to the question of overflow."""
    for gates, dtype in (("g", np.float16), ("scalar", np.float32), ("vector", np.float32), ("g vector", np.float16)):
        case = make_pool_case(9, (3, 2), heads=(1, 2), dims=(18, 17), gates=gates, dtype=dtype)
        for name in ("query", "key", "value", "beta", "state", "g", "gk"):
            tensor = getattr(case, name)
            if tensor is not None:
                changed = tensor.copy()
                changed.flat[changed.size // 3] = value
                assert_emulated(case.but(**{name: changed}), overflow)


@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_states_that_grow_out_of_every_range(overflow: str) -> None:
    for dtype in DTYPES:
        case = make_pool_case(10, (8,), dims=(16, 16), gates="g", dtype=dtype)
        g = np.full_like(case.g, 30.0)
        expected = assert_emulated(case.but(g=g), overflow)
        values = expected.pool[case.slots[-1]].astype(np.float64)
        assert np.isfinite(values).all() == (overflow == "saturate")


@pytest.mark.parametrize("gate", [-np.inf, -1e30, -104.0, -88.0, -60.0, -1e-30, 0.0, 88.0])
def test_gates_at_the_ends(gate: float) -> None:
    for gates in ("g", "vector"):
        case = make_pool_case(11, (3,), gates=gates)
        name = "g" if gates == "g" else "gk"
        assert_emulated(case.but(**{name: np.full_like(getattr(case, name), gate)}))
