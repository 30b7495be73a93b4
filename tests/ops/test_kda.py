"""Kimi Delta Attention: its gates, gates of every size, fla's options, splits, random shapes, refusals."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgdr_numba import ContractError, DtypeError, UnsupportedError, chunk_kda, fused_recurrent_kda
from channel_cases import KDA, channel_loop, gated_case, log_decays, run_gated, run_kda, turned, v_first, without_g
from conftest import COMPILED
from judge import assert_same_bits, assert_within, run_fla, same_bits
from reference import Array, Case, Result, make_case, part

bf16 = ml_dtypes.bfloat16
every_way = pytest.mark.parametrize(
    ("form", "backend"), [("chunk", "fast"), ("chunk", "golden"), ("recurrent", "fast"), ("recurrent", "golden")]
)
forms = pytest.mark.parametrize("form", list(KDA))


def gates_of(form: str, backend: str, a: Array, **options: Any) -> Array:
    """The log decays [1, Hv, K] that raw projections a become: a state of ones forgets by them, and learns nothing."""
    _, _, hv, dk = a.shape
    blank = np.zeros((1, 1, hv, 1), np.float32)
    keys = np.zeros((1, 1, hv, dk), np.float32)
    case = Case(keys, keys, blank, blank[..., 0], blank[..., 0], np.ones((1, hv, dk, 1), np.float32))
    state = run_kda(form, case, a, backend, use_gate_in_kernel=True, **options).state
    with np.errstate(divide="ignore"):
        return np.log(state[..., 0].astype(np.float64))


@every_way
def test_t010_a_lower_bound_is_a_form_of_the_gate_and_no_clamp(form: str, backend: str) -> None:
    zeros = np.zeros((1, 1, 1, 1), np.float32)
    for a, expected in ((0.0, -2.5), (100.0, -5.0), (-100.0, 0.0)):
        weights = {"A_log": np.zeros(1, np.float32), "dt_bias": np.zeros(1, np.float32), "lower_bound": -5.0}
        assert gates_of(form, backend, zeros + a, **weights).item() == pytest.approx(expected, abs=3e-7), a
        assert gates_of(form, backend, zeros + a, lower_bound=-5.0).item() == pytest.approx(expected, abs=3e-7)
    assert gates_of(form, backend, zeros).item() == pytest.approx(-np.log(2), rel=1e-6)


@every_way
def test_t011_every_channel_has_its_bias(form: str, backend: str) -> None:
    a, bias = np.zeros((1, 1, 2, 3), np.float32), np.arange(6, dtype=np.float32)
    expected = [[-0.6931, -1.3133, -2.1269], [-3.0486, -4.0181, -5.0067]]
    for dt_bias in (bias, bias.reshape(2, 3)):
        gates = gates_of(form, backend, a, A_log=np.zeros(2, np.float32), dt_bias=dt_bias)
        np.testing.assert_allclose(gates[0], expected, atol=6e-5)


@every_way
@pytest.mark.parametrize("gate", [-5.0, -11.0, -40.0, "mixed"])
def test_t014_gates_of_any_size(form: str, backend: str, gate: float | str) -> None:
    case = without_g(make_case(14, t=64, dims=(32, 32)))
    g = np.full((1, 64, 1, 32), -40.0 if gate == "mixed" else gate, np.float32)
    if gate == "mixed":
        g[..., 5] = 0
    assert_within(case, run_kda(form, case, g, backend), out=1e-5, state=1e-5, expected=channel_loop(case, g))


@every_way
def test_t016_equal_gates_of_channels_are_the_scalar_gate(form: str, backend: str) -> None:
    case = make_case(16, t=70, heads=(1, 2), dims=(16, 24))
    wide = np.broadcast_to(case.g[..., None], (*case.g.shape, 16))
    other = "recurrent" if form == "recurrent" and backend == "fast" else backend
    actual, expected = run_kda(form, case, wide, backend), run_fla(case, other)
    assert_within(case, actual, out=1e-6, state=1e-6, expected=expected)


@every_way
def test_t016_two_channels_by_hand(form: str, backend: str) -> None:
    k = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
    nothing = np.zeros((1, 1, 1, 1), np.float32)
    case = Case(np.ones_like(k), k, nothing, nothing[..., 0], nothing[..., 0], np.ones((1, 1, 2, 1), np.float32), 1.0)
    out, state = run_kda(form, case, np.array([-1, -2], np.float32).reshape(1, 1, 1, 2), backend)
    np.testing.assert_allclose(state.ravel(), [0.367879, 0.135335], atol=5e-7)
    assert out.item() == pytest.approx(0.503215, abs=5e-7)


@every_way
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bf16])
def test_against_the_token_loop(form: str, backend: str, dtype: Any) -> None:
    case, g, _ = gated_case(1, t=80, heads=(2, 4), dims=(20, 24), cu=(0, 3, 3, 75, 80))
    half = without_g(case).but(l2norm=True, **{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    bound = {np.float32: 2e-6, np.float16: 5e-4, bf16: 4e-3}[dtype]
    actual = run_kda(form, half, g, backend)
    assert actual.out.dtype == dtype
    assert_within(half, actual, out=bound, state=2e-6, expected=channel_loop(half, g))
    assert_same_bits(turned(run_kda(form, v_first(half), g, backend, state_v_first=True)), actual)


@pytest.mark.slow
def test_both_functions_and_gk_are_one() -> None:
    case, g, _ = gated_case(2, t=130, heads=(1, 2), dims=(24, 40))
    case = without_g(case)
    expected = run_gated(case, g, None)
    for form in KDA:
        assert_same_bits(run_kda(form, case, g), expected)


@every_way
def test_raw_gates_have_the_bits_of_gates_computed_before(form: str, backend: str) -> None:
    case, _, _ = gated_case(3, t=9, heads=(1, 2), dims=(8, 6))
    rng = np.random.default_rng(3)
    a, bias, a_log = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 9, 2, 8), 16, 2))
    x = a.astype(np.float64) + bias.reshape(2, 8)
    rate = np.exp(a_log.astype(np.float64))[:, None]
    plain = case.but(beta=(1 / (1 + np.exp(-case.beta.astype(np.float64)))).astype(np.float32))
    for bound, g in ((None, -rate * np.logaddexp(0, x)), (-3.0, -3 / (1 + np.exp(-rate * x)))):
        raw = run_kda(
            form, case, a, backend, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias, lower_bound=bound,
            use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        computed = run_kda(form, plain, g.astype(np.float32), backend)
        assert_within(case, raw, out=1e-6, state=1e-6, expected=computed)
    doubled = run_kda(form, case, a, backend, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    computed = run_kda(form, plain.but(beta=2 * plain.beta), a, backend)
    assert_within(case, doubled, out=1e-6, state=1e-6, expected=computed)


@forms
def test_a_safe_gate_changes_nothing(form: str) -> None:
    case, g, _ = gated_case(4, t=5, dims=(8, 6))
    for options in ({}, {"use_gate_in_kernel": True, "lower_bound": -5.0}):
        assert_same_bits(run_kda(form, case, g, safe_gate=True, **options), run_kda(form, case, g, **options))


@pytest.mark.slow
@pytest.mark.parametrize("state_v_first", [False, True])
def test_chunks_split_at_multiples_of_64_change_no_bit(state_v_first: bool) -> None:
    case, g, _ = gated_case(5, t=200, heads=(1, 2), dims=(37, 21))
    case = v_first(case) if state_v_first else case
    whole = run_kda("chunk", case, g, state_v_first=state_v_first)
    for cuts in ([64], [128], [64, 128, 192]):
        outs, state = [], case.state
        for begin, end in pairwise([0, *cuts, 200]):
            piece = run_kda("chunk", part(case, begin, end, state), g[:, begin:end], state_v_first=state_v_first)
            outs.append(piece.out)
            state = piece.state
        assert_same_bits(Result(np.concatenate(outs, axis=1), state), whole)


@pytest.mark.slow
def test_prefill_then_decode_is_one_prefill() -> None:
    case, g, _ = gated_case(6, t=90, heads=(1, 2), dims=(16, 24))
    whole = run_kda("chunk", case, g)
    first = run_kda("chunk", part(case, 0, 75, case.state), g[:, :75])
    state, outs = first.state, [first.out]
    for t in range(75, 90):
        outs.append(run_kda("recurrent", part(case, t, t + 1, state), g[:, t : t + 1], out_state=state).out)
    assert_same_bits(Result(np.concatenate(outs, axis=1), state), whole)


@pytest.mark.slow
@settings(max_examples=60 if COMPILED else 5)
@given(st.data())
def test_random_calls(data: st.DataObject) -> None:
    """Shapes, packings, gates of every size with zeros and -inf among them, either layout, any float gates."""
    draw = data.draw
    hk, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dims = draw(st.integers(1, 70)), draw(st.integers(1, 140))
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=3))
    size = draw(st.sampled_from([1e-3, 1.0, 40.0]))
    kinds = draw(st.sampled_from([np.float32, np.float16, bf16]))
    seed = draw(st.integers(0, 10**6))
    case = make_case(seed, t=sum(lengths), heads=(hk, hk * group), dims=dims, cu=np.cumsum([0, *lengths]))
    g = log_decays(seed, *case.g.shape, dims[0], size=size)
    g[np.random.default_rng(seed).random(g.shape) < 0.02] = draw(st.sampled_from([0.0, -np.inf, -1000.0]))
    g = g.astype(kinds)
    case = without_g(case)
    is_v_first = draw(st.booleans())
    actual = run_kda("chunk", v_first(case) if is_v_first else case, g, state_v_first=is_v_first)
    actual = turned(actual) if is_v_first else actual
    golden = run_kda("chunk", case, g, "golden")
    for name, a, e in zip(Result._fields, actual, golden, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=3e-6 * max(1, np.abs(e).max(initial=0)), err_msg=name)
    assert_same_bits(run_kda("recurrent", case, g, threads=1), actual)


@pytest.mark.slow
def test_wide_heads_of_long_calls_keep_1e_6() -> None:
    case, g, _ = gated_case(7, t=300, heads=(1, 2), dims=(128, 128), size=0.05)
    case = without_g(case)
    actual, golden = run_kda("chunk", case, g), run_kda("chunk", case, g, "golden")
    assert_within(case, actual, out=1e-6, state=1e-6, expected=golden)


CASE, G, _ = gated_case(8, t=3, heads=(2, 4), dims=(4, 6))
GATE = {"use_gate_in_kernel": True}
WEIGHT = np.zeros(4, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "g of a head": ({"g": G[..., 0]}, ContractError, r"`g` must be \[B, T, Hv, Dk\] \(4 axes\), got 3 axes"),
    "g's width": (
        {"g": G[..., :3]},
        ContractError,
        r"`g` must be \[B, T, Hv, Dk\] = \[1, 3, 4, 4\], got \[1, 3, 4, 3\]",
    ),
    "no g": ({"g": None}, DtypeError, r"`g` must be a NumPy array, got builtins.NoneType"),
    "g of integers": ({"g": G.astype(int)}, DtypeError, r"`g` must be float16, .*, got int64"),
    "A_log without its switch": ({"A_log": WEIGHT}, ContractError, r"`A_log` must be left out without use_gate_in"),
    "a bound without its switch": ({"lower_bound": -5}, ContractError, r"`lower_bound` must be left out .*, got int"),
    "A_log per key head": ({**GATE, "A_log": WEIGHT[:2]}, ContractError, r"`A_log` must be \[Hv\] = \[4\], got \[2\]"),
    "a bias per head": (
        {**GATE, "dt_bias": WEIGHT},
        ContractError,
        r"`dt_bias` must be \[Hv \* Dk\] = \[16\] or \[Hv, Dk\] = \[4, 4\], got \[4\]",
    ),
    "a bias of integers": ({**GATE, "dt_bias": np.zeros(16, int)}, DtypeError, r"`dt_bias` must be float16, .*int64"),
    **{
        f"a bound of {bound}": (
            {**GATE, "lower_bound": bound},
            ContractError,
            rf"`lower_bound` must be from -5 to below 0, got {bound}",
        )
        for bound in (-5.5, 0.0, 1.0, float("nan"))
    },
    "a bound that is no number": ({**GATE, "lower_bound": "-5"}, DtypeError, r"`lower_bound` must be a real number"),
    "safe without a bound": (
        {**GATE, "safe_gate": True},
        ContractError,
        r"`lower_bound` must be given with safe_gate=True and use_gate_in_kernel=True, got None",
    ),
    "safe_gate that is no switch": ({"safe_gate": 1}, DtypeError, r"`safe_gate` must be True or False, got 1"),
    "doubled without a sigmoid": (
        {"allow_neg_eigval": True},
        ContractError,
        r"`allow_neg_eigval` must be False without",
    ),
    "faithful": ({"backend": "faithful"}, UnsupportedError, r'backend="faithful" is not offered'),
    "threads": ({"threads": 0}, ContractError, r"`threads` must be from 1"),
}


@forms
@pytest.mark.parametrize("fault", REFUSED)
def test_faults_are_named(form: str, fault: str) -> None:
    changes, error, message = REFUSED[fault]
    call = {"g": G, "beta": CASE.beta, "backend": "golden", **changes}
    with pytest.raises(error, match=f"^{KDA[form].__name__}: {message}"):
        KDA[form](CASE.q, CASE.k, CASE.v, **call)


def test_what_fla_has_and_is_not_offered() -> None:
    for name in ("disable_recompute", "return_intermediate_states"):
        with pytest.raises(UnsupportedError, match=f"^chunk_kda: `{name}` is not offered: "):
            chunk_kda(CASE.q, CASE.k, CASE.v, G, CASE.beta, backend="golden", **{name: True})
    for function in KDA.values():
        for name in ("head_first", "cp_context", "chunk_size"):
            with pytest.raises(TypeError, match=rf"'{name}' \(known to fla: "):
                function(CASE.q, CASE.k, CASE.v, G, CASE.beta, **{name: 1})
        with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
            function(CASE.q, CASE.k, CASE.v, G, CASE.beta, gate=1)
        with pytest.raises(TypeError, match="positional"):
            function(CASE.q, CASE.k, CASE.v, G, CASE.beta, 1.0)


@forms
def test_states_are_returned_where_they_are_asked_for(form: str) -> None:
    arguments = (CASE.q, CASE.k, CASE.v, G, CASE.beta)
    assert KDA[form](*arguments)[1] is None
    state = CASE.state.copy()
    out, final = fused_recurrent_kda(*arguments, initial_state=state, out_state=state)
    assert final is state
    expected = run_kda(form, CASE, G)
    assert same_bits(out, expected.out)
    assert same_bits(final, expected.state)


def test_out_state_shares_no_memory_with_g() -> None:
    state = CASE.state.copy()
    shared = state.reshape(-1)[: G.size].reshape(G.shape)
    with pytest.raises(ContractError, match=r"^fused_recurrent_kda: `out_state` must .* got some of `g`$"):
        run_kda("recurrent", CASE, shared, out_state=state)


def test_a_float64_call_is_goldens() -> None:
    exact = without_g(CASE).cast(np.float64)
    out, state = chunk_kda(
        exact.q, exact.k, exact.v, G, exact.beta, initial_state=exact.state, output_final_state=True, backend="golden"
    )
    assert_within(exact, Result(out, state), out=1e-13, state=1e-13, expected=channel_loop(exact, G))
    with pytest.raises(DtypeError, match="float64 q, k and v are golden's only"):
        chunk_kda(exact.q, exact.k, exact.v, G, exact.beta)
