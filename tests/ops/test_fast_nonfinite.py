"""Where numbers leave float32: results of fast's chunks are finite exactly where those of the token loop are."""

import os
from itertools import product
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_cases import fast_case, run_fast
from judge import run_fla, same_bits
from reference import Case, Result, relative_rms, token_loop

F32 = np.float32
EXHAUSTIVE = os.environ.get("CGDR_EXHAUSTIVE") == "1"
N_EXAMPLES = 5000 if EXHAUSTIVE else 5 if numba.config.DISABLE_JIT else 200
TENSORS = ("q", "k", "v", "g", "beta", "state")
SPECIAL = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e30, -1e30, 1e19, 0.0)

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def silent_overflow():
    """Inputs overflow by intention."""
    with np.errstate(all="ignore"):
        yield


def by_tokens(case: Case, v_first: bool) -> Result:
    """The token loop in float32."""
    return run_fla(case, "recurrent", state_v_first=v_first)


def disagreement(case: Case, v_first: bool = False) -> str:
    """Which elements are finite in one of both and not in the other, in words."""
    found = []
    for name, a, e in zip(Result._fields, run_fast(case, v_first), by_tokens(case, v_first), strict=True):
        a, e = (np.isfinite(x.astype(np.float32)) for x in (a, e))
        if (a != e).any():
            at = tuple(int(i) for i in np.argwhere(a != e)[0])
            found.append(f"{name}: {(a & ~e).sum()} finite and {(e & ~a).sum()} not, unlike the token loop's, at {at}")
    return "; ".join(found)


def spoiled(case: Case, name: str, place: int, value: float) -> Case:
    """The case with one element exchanged."""
    tensor = getattr(case, name).copy()
    tensor.flat[place % tensor.size] = value
    return case.but(**{name: tensor})


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("name", TENSORS)
def test_one_element_of_an_ordinary_call(name: str, value: float, v_first: bool) -> None:
    places = (0, 77, 10**6 + 3) if numba.config.DISABLE_JIT is False else (77,)
    for place in places:
        case = spoiled(fast_case(8, 21, dims=(6, 5), v_first=v_first), name, place, value)
        found = disagreement(case, v_first)
        assert not found, f"{name}[{place}] = {value}: {found}"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("name", "value"), list(product(TENSORS, (np.nan, np.inf))))
def test_a_spoiled_chunk_keeps_to_itself(name: str, value: float, dtype: Any) -> None:
    """Chunks before, heads beside and sequences beside keep their bits; earlier rows of the chunk stay accurate."""
    case = fast_case(8, (40, 37), heads=(2, 4), dims=(6, 20), dtype=dtype)
    token, own = 21, slice(2, 4) if name in ("q", "k") else slice(2, 3)
    tensor = getattr(case, name).copy()
    tensor[(0, 2, 3, 3) if name == "state" else (0, token, 1 if name in ("q", "k") else 2, 3)[: tensor.ndim]] = value
    clean, dirty = run_fast(case), run_fast(case.but(**{name: tensor}))
    others = [h for h in range(4) if h not in range(own.start, own.stop)]
    assert same_bits(dirty.out[:, :, others], clean.out[:, :, others])
    assert same_bits(dirty.state[:, others], clean.state[:, others])
    assert same_bits(dirty.out[:, 40:], clean.out[:, 40:])
    assert same_bits(dirty.state[1], clean.state[1])
    if name != "state":
        assert same_bits(dirty.out[:, :16], clean.out[:, :16])
        limit = 1e-6 if dtype == np.float32 else 1e-3
        before = slice(16, token)
        assert relative_rms(dirty.out[:, before, own], clean.out[:, before, own]) <= limit
    elif dtype == np.float32:
        columns = [c for c in range(20) if c != 3]
        exact = token_loop(case)
        assert relative_rms(dirty.out[..., columns], exact.out[..., columns]) <= 1e-6


def random_call(knobs: dict[str, Any]) -> tuple[Case, bool]:
    """The call that the knobs stand for: ordinary numbers, sizes moved by powers of ten, special elements."""
    rng = np.random.default_rng(knobs["seed"])
    (dk, dv), (hk, group), v_first = knobs["dims"], knobs["heads"], knobs["v_first"]
    case = fast_case(knobs["seed"], knobs["t"], heads=(hk, hk * group), dims=(dk, dv), v_first=v_first)
    case = case.but(g=(case.g * knobs["steep"]).astype(F32), l2norm=knobs["l2norm"])
    for name, power in zip(TENSORS, knobs["powers"], strict=True):
        if name != "g":
            case = case.but(**{name: (getattr(case, name) * 10.0**power).astype(F32)})
    for name, value in knobs["specials"]:
        case = spoiled(case, name, int(rng.integers(2**40)), value)
    return case, v_first


def elements(values: tuple[float, ...]) -> Any:
    """Up to three elements to exchange for some of these values."""
    return st.lists(st.tuples(st.sampled_from(TENSORS), st.sampled_from(values)), max_size=3)


powers = st.one_of(st.just(0), st.just(0), st.just(0), st.integers(-38, 38))
huge_calls = st.fixed_dictionaries(
    {
        "t": st.integers(1, 8 if numba.config.DISABLE_JIT else 40),
        "heads": st.tuples(st.integers(1, 2), st.integers(1, 2)),
        "dims": st.tuples(st.integers(1, 20), st.integers(1, 20)),
        "v_first": st.booleans(),
        "l2norm": st.booleans(),
        "steep": st.sampled_from([1.0, 0.0, 0.01, -0.5, -2.0, 30.0]),
        "powers": st.tuples(*[powers] * len(TENSORS)),
        "specials": elements((*SPECIAL, 50.0, 88.0, -200.0)),
        "seed": st.integers(0, 2**32 - 1),
    }
)
"""Knobs of a call; its numbers come from the seed."""


def ordinary(knobs: dict[str, Any]) -> dict[str, Any]:
    """The same knobs for numbers of ordinary sizes, but for those that are not finite."""
    specials = [(name, value) for name, value in knobs["specials"] if not abs(value) < np.inf]
    return knobs | {"powers": (0,) * len(TENSORS), "specials": specials}


@settings(max_examples=N_EXAMPLES)
@given(knobs=huge_calls.map(ordinary))
def test_finite_exactly_where_the_token_loop_is(knobs: dict[str, Any]) -> None:
    case, v_first = random_call(knobs)
    found = disagreement(case, v_first)
    assert not found, found


@settings(max_examples=N_EXAMPLES)
@given(knobs=huge_calls)
def test_finite_exactly_where_the_token_loop_is_with_huge_numbers(knobs: dict[str, Any]) -> None:
    case, v_first = random_call(knobs)
    found = disagreement(case, v_first)
    assert not found, found


def quiet_case(t: int = 6, **changes: Any) -> Case:
    """One head of 16 by 16 in which a test changes what matters."""
    case = fast_case(2, t, heads=(1, 1), dims=(16, 16))
    return case.but(**{name: np.broadcast_to(F32(x), getattr(case, name).shape).copy() for name, x in changes.items()})


def growing(last: float) -> np.ndarray:
    """Gates of which only the last of six grows."""
    return np.array([0, 0, 0, 0, 0, last], F32)[None, :, None]


def test_values_times_growth_beyond_float32() -> None:
    """e^50 times 1e18 is more than float32 holds, times keys of 1e-18 it is not."""
    case = quiet_case(beta=1.0, state=0.0, g=growing(50.0))
    case = case.but(k=case.k * F32(1e-18), v=case.v * F32(1e18))
    assert np.isfinite(by_tokens(case, False).state).all()
    assert not disagreement(case)


def test_what_was_erased_does_not_grow() -> None:
    """A state of 1e13 erased by one token; e^60 of it would have left float32."""
    key = np.zeros((1, 6, 1, 16), F32)
    key[..., 0] = 1
    state = np.zeros((1, 1, 16, 16), F32)
    state[0, 0, 0] = 1e13
    case = quiet_case(v=0.0, beta=1.0, g=growing(60.0)).but(q=np.roll(key, 1, -1), k=key, state=state)
    case.beta[:, 5] = 0
    assert (by_tokens(case, False).state == 0).all()
    assert not disagreement(case)


def test_states_that_leave_float32_between_two_tokens() -> None:
    """The token loop's state passes through infinity, which a decay over all tokens at once would not see."""
    case = quiet_case(q=0.0, k=0.0, v=0.0, beta=1.0, state=0.0, g=-1.0)
    case.k[0, 0, 0, 0], case.v[0, 0, 0, 0], case.state[0, 0, 0, 0], case.g[0, 0] = 0.5, 3.3e38, 3e38, 0
    assert not np.isfinite(by_tokens(case, False).state).all()
    assert not disagreement(case)
