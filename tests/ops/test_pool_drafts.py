"""Drafted tokens over a pool, on every backend: their states, those that are taken back, windows of any length."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba import ContractError
from pool_cases import (
    DTYPES,
    PoolCase,
    assert_right,
    every_backend,
    make_pool_case,
    pool_loop,
    run,
    same,
    tokens,
)

WINDOW = np.array([0.5, 0.25, 1, 0.5, 0.5]), np.array([0.5, 1, 0.25, 0.5, 0.75]), np.array([8.0, -4, 2, 6, 1])
"""T073's decays, write strengths and values of five drafted tokens."""
WINDOW_STATES = [6.5, -4, -2.5, 2.375, 1.046875]


def window(n_more: int = 0) -> PoolCase:
    """T073's window over slots 3, 0, 4, 1, 2, the state 10 in slot 3; as many slots more."""
    gates, beta, v = (np.array(x, np.float32)[:, None] for x in WINDOW)
    one = np.ones((5, 1, 1), np.float32)
    pool = np.zeros((5 + n_more, 1, 1, 1), np.float32)
    pool[3] = 10
    return PoolCase(one, one, v[..., None], pool, beta, (5,), [3, 0, 4, 1, 2], g=np.log(gates), scale=1.0)


@every_backend
def test_t073_every_drafted_token_leaves_its_state(backend: str) -> None:
    case = window()
    result = run(case, backend)
    np.testing.assert_allclose(result.out.ravel(), WINDOW_STATES, rtol=3e-7)
    np.testing.assert_allclose(result.pool[case.slots].ravel(), WINDOW_STATES, rtol=3e-7)


@every_backend
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5])
def test_t074_any_number_of_them_is_accepted(backend: str, accepted: int) -> None:
    """4 and 5 of a window of 5 too: nothing is capped."""
    case = window()
    pool = run(case, backend).pool
    silent = case.but(beta=np.zeros_like(case.beta), g=None, accepted=[accepted])
    out = run(silent, backend, pool=pool).out
    np.testing.assert_allclose(out.ravel(), [WINDOW_STATES[accepted - 1]] * 5, rtol=3e-7)


def drafted(seed: int, n_drafted: int, **options: Any) -> tuple[PoolCase, PoolCase]:
    """Two sequences with drafted tokens, and the tokens that come next in the same slots."""
    first, second = (
        make_pool_case(seed + i, (n_drafted, n_drafted), heads=(1, 2), dims=(16, 24), **options) for i in range(2)
    )
    return first, second.but(slots=first.slots)


@every_backend
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_t076_rejected_tokens_leave_no_trace(backend: str, accepted: int, state: Any) -> None:
    """Going on from n accepted tokens has the bits of a run that never saw the others."""
    first, second = drafted(76, 4, gates="g vector", state=state)
    kept = [*range(accepted), *range(4, 4 + accepted)]
    going_on = second.but(accepted=[accepted, accepted])
    results = []
    for rubbish in (0.0, 1e6):
        key, value = first.key.copy(), first.value.copy()
        for t in range(accepted, 4):
            key[[t, 4 + t]], value[[t, 4 + t]] = rubbish, rubbish
        pool = run(first.but(key=key, value=value), backend).pool
        results.append(run(going_on, backend, pool=pool))
    alone = tokens(first, kept, (accepted, accepted))
    results.append(run(going_on, backend, pool=run(alone, backend).pool))
    same(results[1], results[0])
    same(results[2], results[0])
    truth = pool_loop(going_on.but(state=run(alone, backend).pool))
    assert np.abs(results[0].out - truth.out).max() < 1e-5


@every_backend
def test_t077_windows_stay_in_their_slots(backend: str) -> None:
    case = make_pool_case(77, (3, 3), n_slots=16).but(slots=[13, 2, 7, 15, 0, 9])
    page = np.full(case.state.size + 64, -77.0, np.float32)
    pool = page[32:-32].reshape(case.state.shape)
    pool[...] = case.state
    assert_right(case, run(case, backend, pool=pool), 1e-5)
    assert (page[:32] == -77).all()
    assert (page[-32:] == -77).all()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 40])
@every_backend
def test_t079_windows_of_any_length(backend: str, length: int) -> None:
    case = make_pool_case(79, (length, 2))
    if backend == "faithful" and length > 8:
        before = case.state.copy()
        with pytest.raises(ContractError, match=f"at most 8 tokens a sequence for the 310P's kernel, got {length}"):
            run(case, backend, pool=case.state)
        np.testing.assert_array_equal(case.state, before)
        return
    assert_right(case, run(case, backend), 1e-5)
