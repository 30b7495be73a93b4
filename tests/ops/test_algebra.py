"""The delta rule itself: hand computations, closed forms, linearity, hard triangular systems, random shapes."""

from typing import Any

import numpy as np
import pytest

from judge import assert_same_bits, assert_within, both_families, run_cann, run_fla
from reference import (
    Case,
    Result,
    make_case,
    near_same_key,
    periodic_keys,
    random_case,
    rr_out,
    rr_state,
    same_key,
    token_loop,
)

SIZES = [pytest.param(64, id="one-chunk"), pytest.param(256, id="four-chunks", marks=pytest.mark.slow)]


@both_families
def test_t023_three_steps_by_hand(backend: str, run: Any) -> None:
    one = np.ones((1, 3, 1, 1), np.float32)
    half = np.full((1, 3, 1), 0.5, np.float32)
    v = np.array([2, 4, 6], np.float32).reshape(1, 3, 1, 1)
    case = Case(one, one, v, np.log(half), half, np.full((1, 1, 1, 1), 8, np.float32), scale=1.0)
    out, state = run(case, backend)
    np.testing.assert_allclose(out.ravel(), [3.0, 2.75, 3.6875], rtol=3e-7)
    np.testing.assert_allclose(state.ravel(), [3.6875], rtol=3e-7)


def test_t025_nothing_written_is_pure_decay(backend: str) -> None:
    g = np.random.default_rng(25).uniform(-0.05, 0, (1, 130, 1))
    case = make_case(25, t=130, g=g, beta=0.0)
    g_cum = np.cumsum(case.g[0, :, 0].astype(np.float64))
    s0 = case.state[0, 0].astype(np.float64)
    out = case.factor * np.exp(g_cum)[:, None] * (case.q[0, :, 0].astype(np.float64) @ s0)
    expected = Result(out[None, :, None], np.exp(g_cum[-1]) * case.state.astype(np.float64))
    actual = run_fla(case, backend)
    assert_within(case, actual, out=1e-6, state=1e-6, expected=expected)
    assert_same_bits(run_fla(case.but(v=np.full_like(case.v, 1e30)), backend), actual)
    huge = run_fla(case.but(k=np.full_like(case.k, 1e30)), backend)
    if backend == "fast":
        # k . k leaves float32, so these chunks take the token loop: the same numbers, rounded elsewhere.
        assert_within(case, huge, out=1e-6, state=1e-6, expected=expected)
    else:
        assert_same_bits(huge, actual)


@both_families
def test_t026_orthonormal_keys_store_values_exactly(backend: str, run: Any) -> None:
    eye = np.eye(8, dtype=np.float32)[None, :, None]
    v = np.arange(64, dtype=np.float32).reshape(1, 8, 1, 8)
    zeros, ones = np.zeros((1, 8, 1), np.float32), np.ones((1, 8, 1), np.float32)
    out, state = run(Case(eye, eye, v, zeros, ones, scale=1.0), backend)
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(state[0, 0], v[0, :, 0])


def test_t028_powers_of_two_pass_through_bit_for_bit(backend: str) -> None:
    # Gates so mild that nothing on the way is subnormal.
    case = make_case(28, t=200, dims=(8, 8), g=-0.05)
    base = run_fla(case, backend)
    two = np.float32(2)
    doubled = run_fla(case.but(v=case.v * two, state=case.state * two), backend)
    assert_same_bits(doubled, Result(base.out * two, base.state * two))
    brighter = run_fla(case.but(q=case.q * two), backend)
    assert_same_bits(brighter, Result(base.out * two, base.state))


@pytest.mark.parametrize("t", SIZES)
def test_t029_one_key_repeated(backend: str, t: int) -> None:
    case = same_key(t)
    q, v = case.q[0, :, 0].astype(np.float64), case.v[0, :, 0].astype(np.float64)
    k, s0 = case.k[0, 0, 0].astype(np.float64), case.state[0, 0].astype(np.float64)
    along = (q @ k)[:, None]
    out = case.factor * (along * v + (q - along * k) @ s0)
    state = s0 - np.outer(k, k @ s0) + np.outer(k, v[-1])
    expected = Result(out[None, :, None], state[None, None])
    assert_within(case, run_fla(case, backend), out=1e-5, state=1e-5, expected=expected)


@pytest.mark.parametrize("t", SIZES)
def test_t031_keys_that_are_nearly_one(backend: str, t: int) -> None:
    """A float32 token loop measures the error that it makes of the last token's memory, 3e-6 here; chunks do better."""
    case = near_same_key(t)
    bound = 1e-5 if backend == "recurrent" else 2e-6
    assert_within(case, run_fla(case, backend), out=bound, state=bound)


def test_t032_four_keys_in_turn(backend: str) -> None:
    case = periodic_keys()
    assert_within(case, run_fla(case, backend), out=2e-6, state=2e-6)


def judge_random(case: Case, backend: str) -> None:
    """fp32 against the loop on the same values, and both families give the same bits."""
    actual = run_fla(case, backend)
    assert_within(case, actual, out=1e-5, state=1e-5)
    assert_same_bits(run_cann(case, backend), actual)


@pytest.mark.parametrize("seed", range(8))
def test_t034_random_shapes_small(backend: str, seed: int) -> None:
    judge_random(random_case(seed, most_tokens=12, most_width=12).cast(np.float32), backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_t034_random_shapes(backend: str, seed: int) -> None:
    judge_random(random_case(seed).cast(np.float32), backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_t034_random_shapes_in_float64(seed: int) -> None:
    case = random_case(seed)
    assert_within(case, run_fla(case, "golden"), out=1e-11, state=1e-11)


def replaced(case: Case, fault: str) -> Case:
    """A wrong reading of the same call."""
    group = case.v.shape[2] // case.q.shape[2]
    if fault == "ungated":
        return case.but(g=np.zeros_like(case.g))
    if fault == "no-state":
        return case.but(state=np.zeros_like(case.state))
    tiled = [np.tile(x, (1, 1, group, 1)) for x in (case.q, case.k)]
    return case.but(q=tiled[0], k=tiled[1])


@pytest.mark.parametrize("fault", ["ungated", "no-state", "tiled-heads"])
def test_t034_bound_tells_wrong_readings_apart(fault: str) -> None:
    case = make_case(34, t=24, heads=(2, 4), dims=(8, 6))
    truth, wrong = token_loop(case), token_loop(replaced(case, fault))
    assert rr_out(case, wrong.out, truth.out).rr > 0.1
    assert fault == "no-state" or rr_state(wrong.state, truth.state).rr > 0.1
