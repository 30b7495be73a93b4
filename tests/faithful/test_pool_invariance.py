"""What must not change a bit of a call over a pool: tiles, cores, threads, mates, strides; and whose plan runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bits import LAYOUTS, unaligned_backwards
from cgdr_numba import ASCEND_310P, BudgetError, ContractError, DeviceSpec, DtypeError, plan_chunk, plan_step
from cgdr_numba.core.threads import most_threads
from pool_cases import DTYPES, PoolCase, PoolResult, make_pool_case, run, same, tokens

TENSORS = ("query", "key", "value", "beta", "g", "gk")
CASE = make_pool_case(41, (3, 1, 0, 8), heads=(2, 4), dims=(20, 50), gates="g vector", accepted=True, dtype=np.float16)


@pytest.fixture(scope="module")
def expected() -> PoolResult:
    """What the case gives by the default plan."""
    return run(CASE, "faithful")


@pytest.mark.parametrize("v_step", [16, 32, 48, 64])
def test_tiles(v_step: int, expected: PoolResult) -> None:
    plan = plan_step(CASE.dims, CASE.lengths, gk="vector", v_step=v_step)
    assert plan.tiling.n_v_tiles == -(-50 // v_step)
    same(run(CASE, "faithful", plan=plan), expected)


@pytest.mark.parametrize("cores", [1, 2, 3, 7, 40])
def test_cores(cores: int, expected: PoolResult) -> None:
    same(run(CASE, "faithful", target=replace(ASCEND_310P, cores=cores)), expected)


@pytest.mark.parametrize("threads", sorted({1, most_threads()}))
def test_threads(threads: int, expected: PoolResult) -> None:
    for _ in range(5):
        same(run(CASE, "faithful", threads=threads), expected)


def test_devices(expected: PoolResult) -> None:
    same(run(CASE, "faithful", target="host"), expected)
    same(run(CASE, "faithful", target=DeviceSpec("roomy", 3, 4_000_000)), expected)


def test_sequences_see_nothing_of_one_another(expected: PoolResult) -> None:
    """Alone, in another order, and with mates that hold NaN: the same bits."""
    starts = np.cumsum(CASE.lengths) - CASE.lengths
    groups = [list(range(start, start + length)) for start, length in zip(starts, CASE.lengths, strict=True)]
    for n, group in enumerate(groups):
        alone = tokens(CASE, group, (len(group),)).but(accepted=[CASE.accepted[n]])
        result = run(alone, "faithful")
        slots = np.asarray(CASE.slots)[group]
        same(PoolResult(result.out, result.pool[slots]), PoolResult(expected.out[group], expected.pool[slots]))
    order = [3, 0, 2, 1]
    chosen = [t for n in order for t in groups[n]]
    turned = tokens(CASE, chosen, tuple(CASE.lengths[n] for n in order)).but(accepted=[CASE.accepted[n] for n in order])
    result = run(turned, "faithful")
    same(result, PoolResult(expected.out[chosen], expected.pool))
    spoilt = {name: getattr(CASE, name).copy() for name in TENSORS}
    for x in spoilt.values():
        x[groups[0]] = np.nan
    rest = groups[1] + groups[3]
    result = run(CASE.but(**spoilt), "faithful")
    assert np.isnan(result.out[groups[0]]).all()
    same(
        PoolResult(result.out[rest], result.pool[np.asarray(CASE.slots)[rest]]),
        PoolResult(expected.out[rest], expected.pool[np.asarray(CASE.slots)[rest]]),
    )


def test_heads_see_nothing_of_one_another(expected: PoolResult) -> None:
    """A key head with the value heads that it serves gives their bits by itself."""
    for key_head in range(2):
        heads = slice(2 * key_head, 2 * key_head + 2)
        keys = {name: getattr(CASE, name)[:, key_head : key_head + 1] for name in ("query", "key")}
        values = {name: getattr(CASE, name)[:, heads] for name in ("value", "beta", "g", "gk", "state")}
        same(run(CASE.but(**keys, **values), "faithful"), PoolResult(expected.out[:, heads], expected.pool[:, heads]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_addresses_of_inputs(layout: str, expected: PoolResult) -> None:
    turned = {name: LAYOUTS[layout](getattr(CASE, name)) for name in TENSORS}
    same(run(CASE.but(**turned), "faithful"), expected)
    for name, x in turned.items():
        same(run(CASE.but(**{name: x}), "faithful"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_addresses_of_pools(dtype: Any) -> None:
    case = CASE.but(state=CASE.state.astype(dtype))
    wanted = run(case, "faithful")
    odd = np.frombuffer(bytearray(case.state.nbytes + 1), np.uint8)[1:].view(dtype).reshape(case.state.shape)
    odd[...] = case.state
    flipped = case.state[::-1, ::-1].copy()[::-1, ::-1]
    permuted = np.ascontiguousarray(case.state.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    for pool in (odd, flipped, permuted):
        same(run(case, "faithful", pool=pool), wanted)
    with pytest.raises(ContractError, match="`state` must have adjacent elements on its last axis"):
        run(case, "faithful", pool=unaligned_backwards(case.state))


def test_one_number_for_a_whole_axis() -> None:
    case = make_pool_case(42, (2, 3), heads=(2, 2), gates="g vector")
    wide = {name: np.broadcast_to(getattr(case, name)[:1], getattr(case, name).shape) for name in TENSORS}
    written_out = {name: x.copy() for name, x in wide.items()}
    same(run(case.but(**wide), "faithful"), run(case.but(**written_out), "faithful"))


def test_plans_run_where_they_were_made_for(expected: PoolResult) -> None:
    plan = plan_step(CASE.dims, CASE.lengths, gk="vector")
    same(run(CASE, "faithful", plan=plan), expected)
    other: dict[str, PoolCase] = {
        "gates": CASE.but(gk=None),
        "dtype": CASE.cast(np.float32, np.float16),
        "pool": CASE.cast(np.float16, np.float32),
        "lengths": CASE.but(lengths=(3, 1, 8, 0), accepted=None),
    }
    for case in other.values():
        before = case.state.copy()
        with pytest.raises(ContractError, match=r"`plan` must be made for PoolKey\(.*, got one for PoolKey\("):
            run(case, "faithful", pool=case.state, plan=plan)
        np.testing.assert_array_equal(case.state, before)


def test_plans_that_cannot_be() -> None:
    plan = plan_step(CASE.dims, CASE.lengths, gk="vector")
    for options in ({"target": "310p"}, {"threads": 1}):
        with pytest.raises(ContractError, match=f"`plan` excludes `{next(iter(options))}`"):
            run(CASE, "faithful", plan=plan, **options)
    with pytest.raises(ContractError, match=r"`plan` must be left out with backend=\"golden\".* got one for PoolKey"):
        run(CASE, "golden", plan=plan)
    prefill = plan_chunk(CASE.dims, CASE.lengths)
    with pytest.raises(DtypeError, match="`plan` must be a PoolPlan or None, got Plan"):
        run(CASE, "faithful", plan=prefill)
    with pytest.raises(ContractError, match='`overflow` must be "ieee" or "saturate", got \'wrap\''):
        run(CASE, "faithful", overflow="wrap")


def test_what_the_npu_would_overflow_does_not_run_and_a_narrower_tile_does() -> None:
    case = make_pool_case(43, (1,), heads=(1, 2), dims=(64, 320), dtype=np.float16)
    before = case.state.copy()
    with pytest.raises(BudgetError, match=r"the NPU would overflow its UB by \d+ bytes unseen") as caught:
        run(case, "faithful", pool=case.state)
    assert "OVERFLOW" in str(caught.value), "the ledger follows"
    np.testing.assert_array_equal(case.state, before)
    plan = plan_step(case.dims, case.lengths)
    with pytest.raises(BudgetError, match="unseen"):
        run(case, "faithful", plan=plan)
    narrow = plan_step(case.dims, case.lengths, v_step=160)
    roomy = DeviceSpec("roomy", 8, 4_000_000)
    same(run(case, "faithful", plan=narrow), run(case, "faithful", target=roomy))
    with pytest.raises(BudgetError, match="no V tile fits the UB of tight by the host's estimate"):
        run(case, "faithful", target=DeviceSpec("tight", 8, 20_000))
