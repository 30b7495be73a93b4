"""Random calls of fast's chunked form of every kind against golden."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import LAYOUTS
from cgdr_numba import DeviceSpec
from fast_cases import DTYPES, INPUTS, fast_case, run_fast, worst
from judge import run_fla
from reference import Array, Case, Result

EXHAUSTIVE = os.environ.get("CGDR_EXHAUSTIVE") == "1"
"""Whether all examples are tried, instead of as many as an ordinary run has time for."""
N_EXAMPLES = 5000 if EXHAUSTIVE else 5 if numba.config.DISABLE_JIT else 150
MOST_TOKENS = 10 if numba.config.DISABLE_JIT else 100
MOST_WIDTH = 16 if numba.config.DISABLE_JIT else 140
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

lengths = st.one_of(
    st.integers(1, MOST_TOKENS), st.lists(st.integers(0, MOST_TOKENS // 3), min_size=1, max_size=5).map(tuple)
)
widths = st.one_of(st.integers(1, MOST_WIDTH), st.sampled_from([n for n in (1, 8, 16, 64, 128) if n <= MOST_WIDTH]))


def channel_major(x: Array) -> Array:
    """Tokens next to one another."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


PLACES = {**LAYOUTS, "as it comes": lambda x: x, "channel-major": channel_major}
layouts = st.one_of(
    st.just(("as it comes",) * 6),
    st.just((*["channel-major"] * 3, *["as it comes"] * 3)),
    st.tuples(*[st.sampled_from(sorted(PLACES))] * 6),
)
problems = st.fixed_dictionaries(
    {
        "lengths": lengths,
        "heads": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "dims": st.tuples(widths, widths),
        "dtypes": st.tuples(st.sampled_from(DTYPES), *[st.sampled_from(FLOATS)] * 3),
        "gates": st.sampled_from(["ordinary", "none", "mild", "steep", "growing", "model", "forgetting", "missing"]),
        "l2norm": st.booleans(),
        "scale": st.sampled_from([None, 1.0, -0.3, 7.5, 0.0]),
        "state": st.booleans(),
        "v_first": st.booleans(),
        "layouts": layouts,
        "device": st.one_of(st.none(), st.tuples(st.integers(1, 8), st.integers(1, 300_000))),
        "seed": st.integers(0, 2**32 - 1),
    }
)
"""Knobs of a problem; its numbers come from the seed."""


def gates_of(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Gates of a kind, in float64."""
    uniform = rng.random(shape)
    if kind in ("none", "missing"):
        return np.zeros(shape)
    if kind == "mild":
        return -1e-3 * uniform
    if kind == "steep":
        return -40 * uniform
    if kind == "growing":
        return 0.05 * uniform
    if kind == "model":
        return -np.exp(np.log(1e-4) + uniform * np.log(316e4))
    if kind == "forgetting":
        return np.where(uniform < 0.1, rng.choice([-np.inf, -1e30, -700.0], shape), -uniform)
    return -np.log1p(np.exp(rng.standard_normal(shape)))


def problem_of(knobs: dict[str, Any]) -> Case:
    """The case that the knobs stand for, its state in the caller's layout."""
    rng = np.random.default_rng(knobs["seed"])
    hk, group = knobs["heads"]
    qkv, g_dtype, beta_dtype, state_dtype = knobs["dtypes"]
    case = fast_case(
        knobs["seed"], knobs["lengths"], heads=(hk, hk * group), dims=knobs["dims"], dtype=qkv, state=knobs["state"],
        v_first=knobs["v_first"],
    )  # fmt: skip
    with np.errstate(over="ignore"):
        g = gates_of(rng, knobs["gates"], case.g.shape).astype(g_dtype)
    tensors = {"g": g, "beta": case.beta.astype(beta_dtype)}
    if case.state is not None:
        tensors["state"] = case.state.astype(state_dtype)
    case = case.but(**tensors, l2norm=knobs["l2norm"], scale=knobs["scale"])
    return case.but(
        **{
            name: PLACES[place](x)
            for name, place in zip(INPUTS, knobs["layouts"], strict=True)
            if (x := getattr(case, name)) is not None
        }
    )


def wide(case: Case) -> Case:
    """The same numbers in float64, so that golden gives its results unrounded."""
    return case.but(**{name: x.astype(np.float64) for name in INPUTS if (x := getattr(case, name)) is not None})


def by_key(case: Case, result: Result, v_first: bool) -> tuple[Case, Result]:
    """Case and result with the states' keys first."""
    if not v_first:
        return case, result
    state = None if case.state is None else case.state.swapaxes(2, 3)
    return case.but(state=state), Result(result.out, result.state.swapaxes(2, 3))


@settings(max_examples=N_EXAMPLES)
@given(knobs=problems)
def test_random_problems(knobs: dict[str, Any]) -> None:
    case, v_first = problem_of(knobs), knobs["v_first"]
    device = knobs["device"] and DeviceSpec("random", cores=knobs["device"][0], ub_bytes=knobs["device"][1])
    given = case.but(g=None) if knobs["gates"] == "missing" else case
    exact = run_fla(wide(case), "golden", state_v_first=v_first)
    case, actual = by_key(case, run_fast(given, v_first, target=device), v_first)
    share, rr, where = worst(case, actual, by_key(case, exact, v_first)[1], knobs["dtypes"][0])
    note(knobs, share, rr, where)
    assert share <= 1, f"relative rms {rr:.3g}, {share:.3g} times its limit, at {where}"


def note(knobs: dict[str, Any], share: float, rr: float, where: str) -> None:
    """Add a line to the file that CGDR_NOTES names: how near every problem came to its limit."""
    if path := os.environ.get("CGDR_NOTES"):
        with Path(path).open("a") as file:
            file.write(f"{share:.4g}\t{rr:.4g}\t{where}\t{knobs}\n")
