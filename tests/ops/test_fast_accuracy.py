"""How far fast's chunked form is from the float64 loop: float32 to 1e-6, halves to the rounding of the output."""

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import ContractError
from conftest import COMPILED
from fast_cases import DTYPES, WIDTHS, fast_case, run_fast, worst
from judge import assert_within, run_fla, same_bits
from reference import Case, Result, gate_range, make_case, part, relative_rms, rr_out, rr_state, token_loop

slow = pytest.mark.slow
HALVES = [ml_dtypes.bfloat16, np.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def k_first(result: Result) -> Result:
    """A result whose states came with V first, in the layout of the reference."""
    return Result(result.out, result.state.swapaxes(2, 3))


def judge(case: Case, dtype: Any, v_first: bool = False) -> None:
    """Float32 within 1e-6; halves within 1.1 times what rounding the exact output costs; states always 1e-6."""
    by_key = case.but(state=case.state.swapaxes(2, 3)) if v_first else case
    actual = run_fast(case, v_first)
    assert actual.out.dtype == dtype
    assert actual.state.dtype == np.float32
    share, rr, where = worst(by_key, k_first(actual) if v_first else actual, token_loop(by_key), dtype)
    assert share <= 1, f"relative rms {rr:.3g}, {share:.3g} times its limit, at {where}"


@pytest.mark.parametrize("t", [*range(1, 21), *(pytest.param(t, marks=slow) for t in (*range(21, 71), 128, 1000))])
def test_t035_every_length(t: int) -> None:
    judge(fast_case(35, t, heads=(1, 2), dims=(32, 48)), np.float32)


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@every_dtype
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("dims", [pytest.param(d, marks=() if max(d) < 8 else slow) for d in WIDTHS], ids=str)
def test_widths_heads_dtypes_and_layouts(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    lengths = (0, 70, 5, 0, 33, 1, 131) if COMPILED else (0, 18, 1)
    judge(fast_case(38, lengths, heads=(2, 2 * group), dims=dims, dtype=dtype, v_first=v_first), dtype, v_first)


@every_dtype
@pytest.mark.parametrize("steep", [0.0, 0.01, 5.0, 40.0])
def test_steep_and_mild_gates(steep: float, dtype: Any) -> None:
    t = 200 if COMPILED else 18
    g = -steep * np.random.default_rng(9).random((1, t, 2))
    judge(fast_case(9, t, heads=(1, 2), dims=(24, 40), dtype=dtype, g=g), dtype)


@every_dtype
def test_normalised_in_the_operator(dtype: Any) -> None:
    case = fast_case(4, 200 if COMPILED else 9, heads=(1, 2), dims=(40, 24), dtype=dtype)
    sizes = np.random.default_rng(4).choice([0.1, 1, 30], (2, *case.q.shape[:3], 1))
    q, k = ((x * s).astype(dtype) for x, s in zip((case.q, case.k), sizes, strict=True))
    judge(case.but(q=q, k=k, l2norm=True), dtype)


@slow
@every_dtype
def test_models_shape(dtype: Any) -> None:
    judge(fast_case(127, 512, heads=(2, 4), dims=(128, 128), dtype=dtype).but(l2norm=True), dtype)


@slow
@pytest.mark.parametrize("seed", range(5))
def test_t004_gates_over_the_span_of_models(seed: int) -> None:
    for t, hv, width in ((256, 2, 64), (70, 3, 128), (1000, 1, 32)):
        case = gate_range(t, hv, width, seed)
        assert_within(case, run_fast(case), out=2e-6, state=2e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("g", [0.2, 3.7, 4.2])
def test_t007_gates_that_grow(g: float, dtype: Any) -> None:
    """A chunk rises by a factor of e^3, just within e^60, and beyond what differences of gates are taken for."""
    judge(fast_case(7, 16, heads=(1, 2), dims=(16, 24), dtype=dtype, g=g), dtype)


def mild(seed: int, t: int, width: int = 32) -> Case:
    """Gates that forget slowly, so that errors add up."""
    g = np.random.default_rng(seed).uniform(-1e-3, 0, (1, t, 1))
    return make_case(seed, t=t, dims=(width, width), g=g)


@slow
def test_t013_beta_in_float32_keeps_long_runs_exact() -> None:
    case = mild(13, 4096)
    raw = np.random.default_rng(13).standard_normal(case.beta.shape).astype(ml_dtypes.bfloat16).astype(np.float64)
    exact = case.but(beta=1 / (1 + np.exp(-raw)))
    expected = token_loop(exact).state
    assert rr_state(run_fast(exact.but(beta=exact.beta.astype(np.float32))).state, expected).rr <= 1e-5
    assert rr_state(run_fast(exact.but(beta=exact.beta.astype(ml_dtypes.bfloat16))).state, expected).rr > 1e-4


@slow
@pytest.mark.parametrize("piece", [1, 7, 64])
@pytest.mark.parametrize("dtype", HALVES)
def test_t017_state_stays_float32_through_4096_tokens(dtype: Any, piece: int) -> None:
    case = mild(17, 4096)
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    state = half.state
    for begin, end in pairwise([*range(0, 4096, piece), 4096]):
        state = run_fast(part(half, begin, end, state)).state
    assert rr_state(state, token_loop(half).state).rr <= 1e-5


@pytest.mark.parametrize("dtype", HALVES)
def test_t020_states_beyond_half_precision(dtype: Any) -> None:
    case = make_case(20, t=64, beta=0.0, g=np.array([-4.0] + [0.0] * 63)[None, :, None])
    state = case.state.copy()
    state[0, 0, 0, 0] = 65536
    q, k, v = (x.astype(dtype) for x in (case.q, case.k, case.v))
    out, final = run_fast(case.but(q=q, k=k, v=v, state=state))
    assert np.isfinite(out.astype(np.float32)).all()
    assert final[0, 0, 0, 0] == pytest.approx(65536 * np.exp(-4.0), rel=2e-7)


@slow
@pytest.mark.parametrize("decode", ["fast", "recurrent"])
@pytest.mark.parametrize("n_prefill", [1000, 960, 997])
def test_t022_prefill_then_decode(n_prefill: int, decode: str) -> None:
    """Every token's outputs together, and every head's by 64 tokens.

    A single head's output of a single token may be a tenth of its neighbours, and then already the token loop is 2e-6
    from the float64 one.
    """
    case = make_case(22, t=1200, heads=(2, 4), dims=(32, 48))
    whole, first = run_fast(case), run_fast(part(case, 0, n_prefill, case.state))
    outs, state = [first.out], first.state
    for t in range(n_prefill, 1200):
        step = run_fla(part(case, t, t + 1, state), decode)
        outs.append(step.out)
        state = step.state
    out = np.concatenate(outs, axis=1)
    for t in range(1200):
        assert relative_rms(out[:, t], whole.out[:, t]) <= 2e-6
    for begin in range(0, 1200, 64):
        tokens = slice(begin, begin + 64)
        assert rr_out(part(case, begin, begin + 64, None), out[:, tokens], whole.out[:, tokens]).rr <= 1e-6
    assert rr_state(state, whole.state).rr <= 2e-6


@pytest.mark.parametrize("dims", [(32, 32), (32, 48), (48, 32)])
def test_t049_layouts_agree_and_wrong_ones_are_refused(dims: tuple[int, int]) -> None:
    case = make_case(49, t=66 if COMPILED else 9, heads=(1, 2), dims=dims)
    by_key, turned = run_fast(case), case.but(state=np.ascontiguousarray(case.state.swapaxes(2, 3)))
    assert_within(case, k_first(run_fast(turned, True)), out=1e-6, state=1e-6, expected=by_key)
    if dims[0] != dims[1]:
        with pytest.raises(ContractError, match=r"`initial_state` must be \[N, Hv, Dv, Dk\]"):
            run_fast(case, True)


def test_t067_several_tokens_continue_from_a_state() -> None:
    case = make_case(67, t=16, heads=(2, 4), dims=(32, 48))
    whole, one = run_fast(case), run_fast(part(case, 0, 1, case.state))
    assert rr_out(part(case, 0, 1, None), whole.out[:, :1], one.out).rr <= 1e-6
    assert_within(case, whole, out=1e-6, state=1e-6)


def test_t131_subnormal_states_are_kept() -> None:
    case = make_case(131, t=20, beta=0.0, g=0.0)
    tiny = np.full_like(case.state, 1e-39)
    out, state = run_fast(case.but(state=tiny, v=np.zeros_like(case.v)))
    assert same_bits(state, tiny)
    assert np.abs(out - token_loop(case.but(state=tiny)).out).max() <= 1e-38


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_t124_random_shapes_leave_nothing_behind() -> None:
    rng = np.random.default_rng(124)
    after_some = 0
    for i in range(220):
        t, dk, dv = (int(x) for x in rng.integers(1, 129, 3))
        hk, group = (int(x) for x in rng.integers(1, 4, 2))
        run_fast(fast_case(i, t, heads=(hk, hk * group), dims=(dk, dv), dtype=DTYPES[i % 3]))
        if i == 19:
            gc.collect()
            after_some = resident_bytes()
    gc.collect()
    assert resident_bytes() - after_some < 5 * 2**20
