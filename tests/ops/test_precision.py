"""Precision: float64 from end to end, halves rounded once, and the l2 norm at its edges."""

from collections.abc import Callable

import numpy as np
import pytest

from judge import assert_same_bits, assert_within, both_families, run_fla, run_kernel, same_bits
from reference import (
    Array,
    Case,
    Result,
    gate_range,
    make_case,
    near_same_key,
    periodic_keys,
    relative_rms,
    same_key,
    token_loop,
    unit,
)


@both_families
def test_t092_float16_is_rounded_once(backend: str, run: Callable[..., Result]) -> None:
    case = make_case(92, t=100, heads=(1, 2), dims=(32, 32)).cast(np.float16)
    case = case.but(state=case.state.astype(np.float32))
    actual = run(case, backend)
    assert actual.out.dtype == np.float16
    assert actual.state.dtype == np.float32
    assert_within(case, actual, out=4e-4, state=1e-5)


def test_t092_golden_rounds_to_the_nearest_half() -> None:
    case = make_case(92, t=100, heads=(1, 2)).cast(np.float16)
    out = run_fla(case, "golden").out
    exact = token_loop(case).out
    assert same_bits(out, exact.astype(np.float16))


FLOAT64_CASES: dict[str, Callable[[], Case]] = {
    "constant decay": lambda: make_case(1, t=64, g=-1.3),
    "tiny decay": lambda: make_case(2, t=64, g=-27.631),
    "model gates": lambda: gate_range(256, 2, 64),
    "growth": lambda: make_case(7, t=64, g=0.2),
    "one key": lambda: same_key(256),
    "nearly one key": lambda: near_same_key(256),
    "four keys": periodic_keys,
    "grouped heads, tail": lambda: make_case(95, t=131, heads=(2, 6), dims=(24, 17), batch=2),
    "packed": lambda: make_case(95, t=100, heads=(1, 2), cu=(0, 64, 64, 65, 100)),
    "normalised": lambda: make_case(95, t=20).but(l2norm=True),
}


@pytest.mark.parametrize("name", FLOAT64_CASES)
def test_t095_float64_from_end_to_end(name: str) -> None:
    case = FLOAT64_CASES[name]().cast(np.float64)
    rng = np.random.default_rng(95)
    for tensor in ("q", "k", "v", "g", "beta", "state"):
        values = getattr(case, tensor)
        case = case.but(**{tensor: values * (1 + 1e-8 * rng.standard_normal(values.shape))})
    assert relative_rms(case.v.astype(np.float32), case.v) > 3e-9, "float32 holds these values"
    actual = run_fla(case, "golden")
    assert actual.out.dtype == actual.state.dtype == np.float64
    assert_within(case, actual, out=1e-11, state=1e-11)


@pytest.mark.parametrize("scale", [0.1, 1 / 3, -2.0])
def test_t095_scale_and_gates_in_float64(scale: float) -> None:
    case = make_case(95, t=30, dtype=np.float64).but(scale=scale)
    assert_within(case, run_fla(case, "golden"), out=1e-11, state=1e-11)


def test_t095_float32_has_no_float64_inside() -> None:
    """Bit equality with an emulation in which every operation rounds to float32; float64 inside could not keep it."""
    case = make_case(95, t=100, heads=(1, 2), dims=(70, 20))
    actual = run_fla(case, "faithful")
    assert_same_bits(actual, run_kernel(case))
    rounded_once = token_loop(case).out.astype(np.float32)
    assert (actual.out != rounded_once).mean() > 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_t100_zero_vectors_have_no_direction(backend: str, dtype: type) -> None:
    case = make_case(100, t=70, g=-0.01, dtype=dtype).but(l2norm=True)
    case = case.but(q=np.zeros_like(case.q), k=np.zeros_like(case.k))
    out, state = run_fla(case, backend)
    np.testing.assert_array_equal(out, 0)
    decayed = np.exp(case.g[0, :, 0].astype(np.float64).sum()) * case.state.astype(np.float64)
    # Seventy times the same decay, rounded to float32, is seventy times the same error: up to 3e-8 each.
    assert relative_rms(state, decayed) <= (70 * 3e-8 if backend == "recurrent" else 1e-6)


def test_t100_lengths_are_divided_out(backend: str) -> None:
    case = make_case(100, t=70, heads=(2, 4), dims=(24, 8)).but(l2norm=True)
    sizes = np.random.default_rng(100).choice([0, 1e-4, 1, 300], (2, *case.q.shape[:3], 1)).astype(np.float32)
    case = case.but(q=case.q * sizes[0], k=case.k * sizes[1])
    assert_within(case, run_fla(case, backend), out=1e-5, state=1e-5)


def test_t101_squares_beyond_float16(backend: str) -> None:
    q = np.full((1, 1, 1, 128), 300, np.float16)
    v, gate = np.ones((1, 1, 1, 1), np.float16), np.zeros((1, 1, 1), np.float16)
    case = Case(q, q, v, gate, np.ones_like(gate), l2norm=True)
    out, state = run_fla(case, backend)
    # The state is the normalised key; half an ulp of float16 is what rounding to the input's dtype may cost.
    np.testing.assert_allclose(state.ravel(), 128**-0.5, rtol=0, atol=2.0**-15)
    np.testing.assert_allclose(out.astype(np.float64).ravel(), 128**-0.5, rtol=1.5e-3)


def test_t101_float16_norm_is_taken_in_wider_numbers(backend: str) -> None:
    rng = np.random.default_rng(101)
    case = make_case(101, t=20, dims=(128, 16), dtype=np.float16).but(l2norm=True)
    large: list[Array] = [(3000 * unit(rng, *case.q.shape)).astype(np.float16) for _ in range(2)]
    case = case.but(q=large[0], k=large[1])
    actual = run_fla(case, backend)
    assert_within(case, actual, out=1.5e-3, state=1.5e-3)
