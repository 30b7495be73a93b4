"""gk and gv of the recurrent function: results, layouts, dtypes, splits, promises, what is not finite, refusals."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import ContractError, DtypeError
from channel_cases import channel_loop, gated_case, run_gated, turned, v_first, without_g
from conftest import COMPILED
from judge import assert_same_bits, assert_within, run_fla, same_bits
from reference import Array, Case, Result, part

bf16 = ml_dtypes.bfloat16
both_backends = pytest.mark.parametrize("backend", ["fast", "golden"])
KINDS = ["gk", "gv", "g gk", "g gv", "gk gv", "g gk gv"]


def chosen(kinds: str, case: Case, gk: Array, gv: Array) -> tuple[Case, Array | None, Array | None]:
    """The case with those gates that are named."""
    names = kinds.split()
    return (
        case if "g" in names else without_g(case),
        gk if "gk" in names else None,
        gv if "gv" in names else None,
    )


@both_backends
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 16, 24), (2, 6, 20, 7), (3, 3, 33, 16)], ids=str)
def test_against_the_token_loop(backend: str, shape: tuple[int, int, int, int], kinds: str) -> None:
    hk, hv, dk, dv = shape
    case, gk, gv = chosen(kinds, *gated_case(1, t=9, heads=(hk, hv), dims=(dk, dv), batch=2))
    bound = 3e-6 if dk > 1 else 1e-5
    expected = channel_loop(case, gk, gv)
    assert_within(case, run_gated(case, gk, gv, backend), out=bound, state=bound, expected=expected)
    other = run_gated(v_first(case), gk, gv, backend, state_v_first=True)
    assert_same_bits(turned(other), run_gated(case, gk, gv, backend))


@both_backends
def test_packed_sequences_and_states_of_none(backend: str) -> None:
    case, gk, gv = gated_case(2, t=90, heads=(1, 2), dims=(17, 19), cu=(0, 7, 7, 77, 90))
    assert_within(case, run_gated(case, gk, gv, backend), out=3e-6, state=3e-6, expected=channel_loop(case, gk, gv))
    blank = case.but(state=None)
    actual = run_gated(blank, gk, None, backend)
    assert_within(blank, actual, out=3e-6, state=3e-6, expected=channel_loop(blank, gk))
    assert not actual.state[1].any()


@pytest.mark.slow
def test_gates_of_zeros_and_ones_change_no_bit() -> None:
    """A decay of 1 is exact, so absent gates are zeros."""
    case, gk, gv = gated_case(3, t=70, heads=(1, 2), dims=(24, 40))
    none = without_g(case)
    only = run_gated(none, gk, None)
    assert_same_bits(run_gated(none.but(g=np.zeros(none.g.shape, bf16)), gk, np.zeros_like(gv)), only)
    assert_same_bits(run_gated(none.but(g=None), gk, None), only)


@both_backends
def test_t016_equal_gates_of_channels_are_a_g(backend: str) -> None:
    case, gk, gv = gated_case(16, t=70, heads=(1, 2), dims=(16, 24))
    expected = run_fla(case, "recurrent" if backend == "fast" else backend)
    for wide in (gk, gv):
        same = np.broadcast_to(case.g[..., None], wide.shape)
        gates = (same, None) if wide is gk else (None, same)
        actual = run_gated(without_g(case), *gates, backend)
        assert_within(case, actual, out=1e-6, state=1e-6, expected=expected)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["gk", "g gk gv"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bf16])
def test_splits_at_any_token_change_no_bit(dtype: Any, kinds: str) -> None:
    case, gk, gv = chosen(kinds, *gated_case(4, t=131, heads=(2, 4), dims=(37, 21)))
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    whole = run_gated(half, gk, gv)
    for cuts in ([1], [64], [63, 65], [1, 2, 3, 100], list(range(1, 131, 7))):
        outs, state = [], half.state
        for begin, end in pairwise([0, *cuts, 131]):
            gates = (None if x is None else x[:, begin:end] for x in (gk, gv))
            piece = run_gated(part(half, begin, end, state), *gates)
            outs.append(piece.out)
            state = piece.state
        assert_same_bits(Result(np.concatenate(outs, axis=1), state), whole)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["gk", "g gk gv"])
def test_bits_do_not_depend_on_threads_mates_strides_or_alignment(kinds: str) -> None:
    case, gk, gv = chosen(kinds, *gated_case(5, t=70, heads=(2, 6), dims=(40, 24), batch=3))
    whole = run_gated(case, gk, gv)
    for threads in (1, 2):
        assert_same_bits(run_gated(case, gk, gv, threads=threads), whole)
    for row in range(3):
        own = slice(row, row + 1)
        alone = case.but(**{name: getattr(case, name)[own] for name in ("q", "k", "v", "g", "beta", "state")})
        gates = (None if x is None else x[own] for x in (gk, gv))
        assert_same_bits(run_gated(alone, *gates), Result(whole.out[own], whole.state[own]))
    few = case.but(
        **{name: getattr(case, name)[:, :, :1] for name in ("q", "k")},
        **{name: getattr(case, name)[:, :, :1] for name in ("v", "g", "beta")},
        state=case.state[:, :1],
    )
    gates = (None if x is None else x[:, :, :1] for x in (gk, gv))
    assert_same_bits(run_gated(few, *gates), Result(whole.out[:, :, :1], whole.state[:, :1]))
    names = ("q", "k", "v", "g", "beta", "state")
    fortran = case.but(**{name: np.asfortranarray(getattr(case, name)) for name in names})
    gates = (None if x is None else np.asfortranarray(x) for x in (gk, gv))
    assert_same_bits(run_gated(fortran, *gates), whole)
    odd = np.frombuffer(b"x" + case.state.tobytes(), np.uint8)[1:].view(np.float32).reshape(case.state.shape)
    assert_same_bits(run_gated(case.but(state=odd), gk, gv), whole)


@pytest.mark.slow
def test_few_heads_are_cut_for_threads_without_a_changed_bit() -> None:
    """One key head of one value head: parts of its columns fill the cores."""
    case, gk, _ = gated_case(6, t=80, heads=(1, 1), dims=(32, 100))
    whole = run_gated(without_g(case), gk, None, threads=1)
    assert_same_bits(run_gated(without_g(case), gk, None, threads=2), whole)
    for columns in (slice(0, 16), slice(7, 50)):
        alone = without_g(case).but(v=case.v[..., columns], state=case.state[..., columns])
        assert_same_bits(run_gated(alone, gk, None), Result(whole.out[..., columns], whole.state[..., columns]))


@pytest.mark.parametrize("dtype", [np.float16, bf16, np.float64])
def test_gates_and_states_of_other_dtypes(dtype: Any) -> None:
    case, gk, gv = gated_case(7, t=5, heads=(1, 2), dims=(24, 40))
    other = case.but(state=case.state.astype(dtype))
    gk, gv = gk.astype(dtype), gv.astype(dtype)
    actual = run_gated(other, gk, gv)
    singles = other.but(state=other.state.astype(np.float32))
    assert actual.state.dtype == np.float32
    assert_same_bits(actual, run_gated(singles, gk.astype(np.float32), gv.astype(np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bf16])
def test_accuracy_is_that_of_float32(dtype: Any) -> None:
    case, gk, gv = gated_case(8, t=150, heads=(1, 2), dims=(128, 128), size=0.05)
    half = case.but(l2norm=True, **{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    expected = channel_loop(half, gk, gv)
    floor = 1e-6 if dtype == np.float32 else 4e-4 if dtype == np.float16 else 4e-3
    assert_within(half, run_gated(half, gk, gv), out=floor, state=1e-6, expected=expected)


def test_a_state_in_place() -> None:
    for t in (1, 3, 70) if COMPILED else (1, 3):
        case, gk, gv = gated_case(9, t=t, heads=(1, 2), dims=(24, 40))
        for source in (case, v_first(case)):
            options = {"state_v_first": source is not case}
            expected = run_gated(source, gk, gv, **options)
            state = source.state.copy()
            actual = run_gated(source.but(state=state), gk, gv, out_state=state, **options)
            assert actual.state is state
            assert_same_bits(actual, expected)
            pool = np.full((3, 5, *state.shape[2:]), np.nan, np.float32)
            inner = pool[1:2, 1:3]
            assert_same_bits(run_gated(source, gk, gv, out_state=inner, **options), expected)
            assert np.isnan(pool[[0, 2]]).all()


@np.errstate(all="ignore")
def float32_loop(case: Case, gk: Array, gv: Array | None) -> Result:
    """The token loop in float32, one head, each decay by itself."""
    f32, s = np.float32, case.state[0, 0].copy()
    out = np.empty_like(case.v)
    for t in range(case.v.shape[1]):
        s = np.exp(case.g[0, t, 0]).astype(f32) * s
        s = np.exp(gk[0, t, 0])[:, None].astype(f32) * s
        s = s if gv is None else s * np.exp(gv[0, t, 0]).astype(f32)
        error = case.beta[0, t, 0] * (case.v[0, t, 0] - (s * case.k[0, t, 0][:, None]).sum(axis=0, dtype=f32))
        s = s + case.k[0, t, 0][:, None] * error
        out[0, t, 0] = f32(case.factor) * (s * case.q[0, t, 0][:, None]).sum(axis=0, dtype=f32)
    return Result(out, s[None, None])


EXTREME = [-np.inf, np.inf, np.nan, -1e30, -200.0, -104.0, -88.0, 88.0, 200.0, 0.0]


@pytest.mark.parametrize("value", EXTREME)
@pytest.mark.parametrize("kinds", ["gk", "g gk gv"])
def test_results_are_finite_where_the_float32_loop_is(kinds: str, value: float) -> None:
    case, gk, gv = chosen(kinds, *gated_case(10, t=7, heads=(1, 1), dims=(6, 5)))
    for channels, tokens in ((slice(None), 3), (slice(2, 3), 3), (slice(1, 4), slice(2, 5)), (slice(None), 6)):
        wild = gk.copy()
        wild[0, tokens, 0, channels] = value
        expected = float32_loop(case, wild, gv)
        actual = run_gated(case, wild, gv)
        for a, e in zip(actual, expected, strict=True):
            assert np.array_equal(np.isfinite(a), np.isfinite(e))
            finite = np.isfinite(e)
            np.testing.assert_allclose(a[finite], e[finite], rtol=1e-4, atol=1e-5 * np.abs(e[finite]).max(initial=1))


def test_opposite_infinities_of_g_and_gk_are_the_loops() -> None:
    """0 times infinity, as the loop has it, where one gate empties what the other would raise."""
    case, gk, _ = gated_case(11, t=3, heads=(1, 1), dims=(4, 4))
    g = case.g.copy()
    g[0, 1] = -200
    gk[0, 1, 0, 2] = 200
    actual, expected = run_gated(case.but(g=g), gk, None), float32_loop(case.but(g=g), gk, None)
    assert np.array_equal(np.isnan(actual.state), np.isnan(expected.state))
    assert np.isnan(actual.state).any()


CASE, GK, GV = gated_case(12, t=3, heads=(1, 2), dims=(4, 6))
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "gk's heads": ({"gk": GK[:, :, :1]}, ContractError, r"`gk` must be \[B, T, Hv, Dk\] = \[1, 3, 2, 4\], got"),
    "gk's width": ({"gk": GV}, ContractError, r"`gk` must be \[B, T, Hv, Dk\] = \[1, 3, 2, 4\], got \[1, 3, 2, 6\]"),
    "gv's width": ({"gv": GK}, ContractError, r"`gv` must be \[B, T, Hv, Dv\] = \[1, 3, 2, 6\], got \[1, 3, 2, 4\]"),
    "gv's rank": ({"gv": GV[..., 0]}, ContractError, r"`gv` must be \[B, T, Hv, Dv\] \(4 axes\), got 3 axes"),
    "gk of integers": ({"gk": GK.astype(int)}, DtypeError, r"`gk` must be float16, .*, got int64"),
    "gv as a list": ({"gv": GV.tolist()}, DtypeError, r"`gv` must be a NumPy array, got builtins.list"),
    "gk in out_state": (
        {"gk": CASE.state.reshape(-1)[: GK.size].reshape(GK.shape), "out_state": CASE.state},
        ContractError,
        r"`out_state` must .* got some of `gk`",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_faults_are_named(fault: str) -> None:
    changes, error, message = REFUSED[fault]
    with pytest.raises(error, match=f"^fused_recurrent_gated_delta_rule: {message}"):
        run_gated(CASE, **{"gk": GK, "gv": GV, **changes})


def test_inputs_stay_and_float64_is_goldens() -> None:
    before = GK.copy(), GV.copy(), CASE.state.copy()
    run_gated(CASE, GK, GV)
    assert all(same_bits(x, y) for x, y in zip(before, (GK, GV, CASE.state), strict=True))
    exact = CASE.cast(np.float64)
    expected = channel_loop(exact, GK, GV)
    assert_within(exact, run_gated(exact, GK, GV, "golden"), out=1e-13, state=1e-13, expected=expected)
    with pytest.raises(DtypeError, match="float64 q, k and v are golden's only"):
        run_gated(exact, GK, GV)
