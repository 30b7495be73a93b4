"""Random problems of every kind: the faithful backend has the emulation's bits, and never anything but a result."""

import os
from typing import Any

import ml_dtypes
import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import INPUT_DTYPES, LAYOUTS, OPTION_PAIRS, TENSORS, Call, difference, emulated, faithful
from cgdr_numba import DeviceSpec, plan_chunk

EXHAUSTIVE = os.environ.get("CGDR_EXHAUSTIVE") == "1"
"""Whether all examples are tried, instead of as many as an ordinary run has time for."""
N_EXAMPLES = 2000 if EXHAUSTIVE else 15 if numba.config.DISABLE_JIT else 500
VALUES = ("plain", "zeros", "tiny", "huge", "gates", "infinite", "anything")
"""What kinds of numbers the tensors of a problem hold."""
MOST_TOKENS = 8 if numba.config.DISABLE_JIT else 70

widths = st.one_of(st.integers(1, 20), st.integers(1, 20), st.integers(1, 70))
short = st.lists(st.integers(0, 9), max_size=4)
long = st.tuples(st.integers(10, MOST_TOKENS), st.integers(0, 3)).map(list) if MOST_TOKENS > 10 else short
problems = st.fixed_dictionaries(
    {
        "lengths": st.one_of(short, short, short, long).map(tuple),
        "heads": st.tuples(st.integers(1, 2), st.integers(1, 3)),
        "dims": st.tuples(widths, widths),
        "dtypes": st.tuples(st.sampled_from(INPUT_DTYPES), *[st.sampled_from((*INPUT_DTYPES, np.float64))] * 3),
        "values": st.sampled_from(VALUES),
        "layouts": st.tuples(*[st.sampled_from(["as it comes", *LAYOUTS])] * len(TENSORS)),
        "has_g": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)
"""Knobs of a problem; its numbers come from the seed, since drawing them one by one would take seconds."""


def extremes(dtype: Any) -> np.ndarray:
    """The ends of a dtype's range, in float64."""
    info = ml_dtypes.finfo(dtype)
    sizes = [0.0, 1.0, *map(float, (info.smallest_subnormal, info.tiny, info.max, info.eps)), np.inf]
    return np.array([*sizes, *(-size for size in sizes), np.nan])


@np.errstate(all="ignore")
def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, values: str) -> np.ndarray:
    """Random numbers of a kind, as their dtype holds them."""
    x = rng.standard_normal(shape)
    if values == "zeros":
        x *= rng.integers(-1, 2, shape)
    elif values == "tiny":
        x *= float(ml_dtypes.finfo(dtype).tiny) * np.exp2(rng.integers(-12, 12, shape))
    elif values == "huge":
        x *= float(ml_dtypes.finfo(dtype).max) * np.exp2(rng.integers(-12, 0, shape))
    elif values == "infinite":
        x = np.where(rng.random(shape) < 0.05, rng.choice([np.inf, -np.inf, np.nan], shape), x)
    elif values == "anything":
        spread = x * np.exp2(rng.integers(-40, 40, shape))
        x = np.where(rng.random(shape) < 0.3, rng.choice(extremes(dtype), shape), spread)
    return x.astype(dtype)


def call_of(problem: dict[str, Any]) -> Call:
    """The call that the knobs stand for."""
    rng = np.random.default_rng(problem["seed"])
    (hk, group), (dk, dv), lengths = problem["heads"], problem["dims"], problem["lengths"]
    t, hv, values = sum(lengths), hk * group, problem["values"]
    qkv, g_dtype, beta_dtype, state_dtype = problem["dtypes"]
    shapes = [(t, hk, dk), (t, hk, dk), (t, hv, dv), (t, hv), (t, hv), (len(lengths), hv, dv, dk)]
    dtypes = [qkv, qkv, qkv, g_dtype, beta_dtype, state_dtype]
    tensors = {
        name: numbers(rng, shape, dtype, values) for name, shape, dtype in zip(TENSORS, shapes, dtypes, strict=True)
    }
    if values == "gates":
        tensors["g"] = numbers(rng, (t, hv), g_dtype, "plain") * (10.0 ** rng.integers(-3, 3, (t, hv))).astype(g_dtype)
    if not problem["has_g"]:
        tensors["g"] = None
    scale = float(rng.choice([1.0, dk**-0.5, -0.3, 0.0, 1e-40, 1e38]))
    return Call(**tensors, lengths=lengths, scale=scale)


def laid_out(call: Call, layouts: tuple[str, ...]) -> Call:
    """The same numbers elsewhere in memory."""
    chosen = {name: LAYOUTS[layout] for name, layout in zip(TENSORS, layouts, strict=True) if layout in LAYOUTS}
    return call.but(**{name: turn(x) for name, turn in chosen.items() if (x := getattr(call, name)) is not None})


@settings(max_examples=N_EXAMPLES)
@given(problem=problems, options=st.sampled_from(OPTION_PAIRS), cores=st.integers(1, 8), narrow=st.booleans())
def test_random_problems(problem: dict[str, Any], options: dict[str, str], cores: int, narrow: bool) -> None:
    call = call_of(problem)
    device = DeviceSpec("random", cores=cores, ub_bytes=500_000)
    plan = plan_chunk(
        call.dims, call.lengths, dtype=call.query.dtype.name, target=device, v_step=16 if narrow else None
    )
    actual = faithful(laid_out(call, problem["layouts"]), **options, plan=plan)
    found = difference(actual, emulated(call, **options))
    assert not found, found
