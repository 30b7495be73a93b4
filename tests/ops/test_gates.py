"""Raw gates through the public functions: the bits of gates computed before, and refusals of half an option."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy import special

from cgdr_numba import (
    ContractError,
    DtypeError,
    RecurrentStep,
    chunk_gated_delta_rule,
    fused_gdn_gating,
    fused_recurrent_gated_delta_rule,
)
from judge import assert_same_bits, assert_within, run_fla, same_bits
from reference import Array, Case, Result, make_case, rr_state, token_loop

bf16 = ml_dtypes.bfloat16
FLOATS = [np.float16, bf16, np.float32, np.float64]
OPERATORS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]


def raw_case(seed: int, dtype: Any = np.float32, **options: Any) -> tuple[Case, Array, Array]:
    """A case whose g and beta are raw projections of `dtype`, its A_log and its dt_bias."""
    case = make_case(seed, **options)
    rng = np.random.default_rng([seed, 1])
    a, b = (rng.standard_normal((2, *case.g.shape)) * 2).astype(dtype)
    a_log, dt_bias = rng.standard_normal((2, case.g.shape[-1])).astype(dtype)
    return case.but(g=a, beta=b), a_log, dt_bias


def run_raw(case: Case, backend: str, a_log: Array, dt_bias: Array | None, **options: Any) -> Result:
    """The case with both gates raw."""
    return run_fla(
        case,
        backend,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        **options,
    )


def gates64(case: Case, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """G and beta in float64."""
    a, b, rate, bias = (x.astype(np.float64) for x in (case.g, case.beta, a_log, dt_bias))
    return -np.exp(rate) * np.logaddexp(0, a + bias), special.expit(b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_raw_gates_have_the_bits_of_gates_computed_before(backend: str, dtype: Any) -> None:
    case, a_log, dt_bias = raw_case(1, dtype, t=9, heads=(1, 2), dims=(8, 8))
    g, beta = fused_gdn_gating(a_log, case.g, case.beta, dt_bias)
    computed = run_fla(case.but(g=g, beta=beta), backend)
    assert_same_bits(run_raw(case, backend, a_log, dt_bias), computed)
    only_g = run_fla(case.but(beta=beta), backend, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias)
    assert_same_bits(only_g, computed)
    assert_same_bits(run_fla(case.but(g=g), backend, use_beta_sigmoid_in_kernel=True), computed)
    doubled = run_raw(case, backend, a_log, None, allow_neg_eigval=True)
    g, beta = fused_gdn_gating(a_log, case.g, case.beta, None)
    assert_same_bits(doubled, run_fla(case.but(g=g, beta=2 * beta), backend))


@pytest.mark.parametrize("dtype", FLOATS)
def test_raw_gates_against_the_definition(backend: str, dtype: Any) -> None:
    case, a_log, dt_bias = raw_case(2, dtype, t=12, heads=(1, 2), dims=(8, 8), cu=(0, 5, 5, 12))
    g, beta = gates64(case, a_log, dt_bias)
    expected = token_loop(case.but(g=g, beta=beta))
    assert_within(case, run_raw(case, backend, a_log, dt_bias), out=2e-6, state=2e-6, expected=expected)


def raw64(seed: int) -> tuple[Case, Array, Array]:
    """A raw case with every tensor in float64."""
    case, a_log, dt_bias = raw_case(seed, np.float64, t=20, heads=(1, 2), dims=(8, 8))
    return case.cast(np.float64), a_log, dt_bias


@pytest.mark.parametrize("operator", OPERATORS)
def test_golden_in_float64_keeps_gates_in_float64(operator: Any) -> None:
    case, a_log, dt_bias = raw64(3)
    g, beta = gates64(case, a_log, dt_bias)
    expected = token_loop(case.but(g=g, beta=beta))
    out, state = operator(
        case.q, case.k, case.v, g=case.g, beta=case.beta, initial_state=case.state, output_final_state=True,
        use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, backend="golden",
    )  # fmt: skip
    assert out.dtype == state.dtype == np.float64
    assert_within(case, Result(out, state), out=1e-13, state=1e-13, expected=expected)


def long_raw_case(t: int, width: int) -> tuple[Case, Case]:
    """Gates that forget slowly and logits in bfloat16; and the same with exact write strengths."""
    rng = np.random.default_rng(13)
    case = make_case(13, t=t, dims=(width, width), g=rng.uniform(-1e-3, 0, (1, t, 1)))
    case = case.but(beta=rng.standard_normal(case.beta.shape).astype(bf16))
    return case, case.but(beta=special.expit(case.beta.astype(np.float64)))


def judge_t013(t: int, width: int) -> None:
    case, exact = long_raw_case(t, width)
    expected = token_loop(exact).state
    actual = run_fla(case, "recurrent", use_beta_sigmoid_in_kernel=True)
    assert rr_state(actual.state, expected).rr <= 1e-5
    rounded = run_fla(exact.but(beta=exact.beta.astype(bf16)), "recurrent")
    assert rr_state(rounded.state, expected).rr > 1e-4, "a rounded beta would show"


def test_t013_sigmoid_of_bf16_logits_is_not_rounded_back() -> None:
    judge_t013(40, 8)


@pytest.mark.slow
def test_t013_sigmoid_of_bf16_logits_through_4096_tokens() -> None:
    judge_t013(4096, 32)


def test_infinite_and_nan_projections(backend: str) -> None:
    case, a_log, dt_bias = raw_case(5, t=7, heads=(3, 3), dims=(8, 8))
    a = case.g.copy()
    a[0, 3] = [-np.inf, np.inf, np.nan]
    g, beta = gates64(case, a_log, dt_bias)
    g[0, 3] = [-0.0, -np.inf, np.nan]
    actual, expected = run_raw(case.but(g=a), backend, a_log, dt_bias), token_loop(case.but(g=g, beta=beta))
    assert np.isnan(actual.out[:, 3:, 2]).all()
    assert np.isnan(actual.state[:, 2]).all()
    # Behind a decay of 0 the kernel computes inf - inf, as with any g of -inf.
    for h in (0, 1) if backend != "faithful" else (0,):
        np.testing.assert_allclose(actual.out[:, :, h], expected.out[:, :, h], rtol=0, atol=2e-6)
        np.testing.assert_allclose(actual.state[:, h], expected.state[:, h], rtol=0, atol=2e-6)


def test_strided_raw_gates_change_no_bit_and_inputs_stay(backend: str) -> None:
    case, a_log, dt_bias = raw_case(6, bf16, t=6, heads=(1, 2), dims=(8, 8), batch=2)
    expected = run_raw(case, backend, a_log, dt_bias)
    both = np.concatenate([case.g, case.beta], axis=-1).transpose(2, 1, 0).copy().transpose(2, 1, 0)
    before = both.copy()
    strided = case.but(g=both[..., :2], beta=both[..., 2:])
    actual = run_raw(strided, backend, np.repeat(a_log, 3)[::3], np.repeat(dt_bias, 2)[::2])
    assert_same_bits(actual, expected)
    assert same_bits(both, before)


def test_out_state_in_place_with_raw_gates_and_a_prepared_step() -> None:
    case, a_log, dt_bias = raw_case(7, t=1, heads=(1, 2), dims=(16, 16))
    expected = run_raw(case, "recurrent", a_log, dt_bias)
    state = case.state.copy()
    actual = run_raw(case.but(state=state), "recurrent", a_log, dt_bias, out_state=state)
    assert actual.state is state
    assert_same_bits(actual, expected)
    g, beta = fused_gdn_gating(a_log, case.g, case.beta, dt_bias)
    stepped = case.state.copy()
    step = RecurrentStep(case.q, case.k, case.v, g, beta, stepped)
    assert_same_bits(Result(step(case.q, case.k, case.v, g, beta, stepped), stepped), expected)


@pytest.mark.parametrize("name", ["g", "A_log", "dt_bias", "beta"])
def test_out_state_shares_no_memory_with_raw_gates(name: str) -> None:
    case, a_log, dt_bias = raw_case(8, t=1, heads=(1, 2), dims=(16, 16))
    state = case.state.copy()
    memory = state.reshape(-1)[:2]
    tensors = {"g": case.g, "beta": case.beta, "A_log": a_log, "dt_bias": dt_bias}
    tensors[name] = memory.reshape(tensors[name].shape)
    with pytest.raises(ContractError, match=rf"`out_state` must .* got some of `{name}`"):
        run_raw(
            case.but(g=tensors["g"], beta=tensors["beta"]), "recurrent", tensors["A_log"], tensors["dt_bias"],
            out_state=state,
        )  # fmt: skip


GATE = {"use_gate_in_kernel": True}
WEIGHT = np.zeros(4, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no A_log": (GATE, ContractError, r"`A_log` must be given with use_gate_in_kernel=True, got None"),
    "only dt_bias": ({**GATE, "dt_bias": WEIGHT}, ContractError, r"`A_log` must be given with .*, got None"),
    "no g": ({**GATE, "A_log": WEIGHT, "g": None}, ContractError, r"`g` must be given with use_gate_in_kernel=True"),
    "no beta": (
        {"use_beta_sigmoid_in_kernel": True, "beta": None},
        ContractError,
        r"`beta` must be given with use_beta_sigmoid_in_kernel=True, got None",
    ),
    "A_log without its switch": (
        {"A_log": WEIGHT},
        ContractError,
        r"`A_log` must be left out without use_gate_in_kernel=True, got an array \[4\]",
    ),
    "dt_bias without its switch": (
        {"dt_bias": [0.0], "use_beta_sigmoid_in_kernel": True},
        ContractError,
        r"`dt_bias` must be left out without use_gate_in_kernel=True, got list",
    ),
    "doubled without a sigmoid": (
        {"allow_neg_eigval": True},
        ContractError,
        r"`allow_neg_eigval` must be False without use_beta_sigmoid_in_kernel=True, got True",
    ),
    "A_log per key head": ({**GATE, "A_log": WEIGHT[:2]}, ContractError, r"`A_log` must be \[Hv\] = \[4\], got \[2\]"),
    "A_log of fla's KDA": (
        {**GATE, "A_log": WEIGHT.reshape(1, 1, 4, 1)},
        ContractError,
        r"`A_log` must be \[Hv\] = \[4\], got \[1, 1, 4, 1\]",
    ),
    "dt_bias per token": (
        {**GATE, "A_log": WEIGHT, "dt_bias": np.zeros((3, 4))},
        ContractError,
        r"`dt_bias` must be \[Hv\] = \[4\], got \[3, 4\]",
    ),
    "A_log as a list": ({**GATE, "A_log": [0.0] * 4}, DtypeError, r"`A_log` must be a NumPy array, got builtins.list"),
    "A_log of integers": ({**GATE, "A_log": np.zeros(4, int)}, DtypeError, r"`A_log` must be float16, .*, got int64"),
    "dt_bias of another byte order": (
        {**GATE, "A_log": WEIGHT, "dt_bias": WEIGHT.astype(">f4")},
        DtypeError,
        r"`dt_bias` must be in native byte order, got dtype >f4",
    ),
    "g of another shape": (
        {**GATE, "A_log": WEIGHT, "g": np.zeros((1, 3, 2))},
        ContractError,
        r"`g` must be \[B, T, Hv\] = \[1, 3, 4\], got \[1, 3, 2\]",
    ),
    **{
        f"{name} that is no switch": ({name: 1}, DtypeError, rf"`{name}` must be True or False, got 1")
        for name in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    },
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("fault", REFUSED)
def test_half_an_option_is_refused(operator: Any, fault: str) -> None:
    changes, error, message = REFUSED[fault]
    case = make_case(9, t=3, heads=(2, 4), dims=(4, 4))
    call = {"g": case.g, "beta": case.beta, "backend": "golden", **changes}
    with pytest.raises(error, match=rf"^{operator.__name__}: {message}"):
        operator(case.q, case.k, case.v, **call)


@pytest.mark.parametrize("operator", OPERATORS)
def test_switches_of_numpy_are_taken_and_off_is_off(operator: Any) -> None:
    case, a_log, _ = raw_case(10, t=3, heads=(2, 4), dims=(4, 4))
    tensors = {"q": case.q, "k": case.k, "v": case.v, "g": case.g, "beta": case.beta, "backend": "golden"}
    plain, _ = operator(**tensors)
    off, _ = operator(**tensors, use_gate_in_kernel=np.False_, allow_neg_eigval=False, A_log=None)
    assert same_bits(plain, off)
    on, _ = operator(**tensors, use_gate_in_kernel=True, A_log=a_log)
    numpys, _ = operator(**tensors, use_gate_in_kernel=np.True_, A_log=a_log)
    assert same_bits(on, numpys)
    assert not same_bits(on, plain)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gating_by_itself(dtype: Any) -> None:
    case, a_log, dt_bias = raw_case(11, dtype, t=33, heads=(1, 6), dims=(4, 4), batch=2)
    g, beta = fused_gdn_gating(a_log, case.g, case.beta, dt_bias)
    g64, beta64 = gates64(case, a_log, dt_bias)
    np.testing.assert_allclose(g, g64, rtol=6e-8)
    np.testing.assert_allclose(beta, beta64, rtol=6e-8)
    assert g.dtype == beta.dtype == np.float32
    rows = fused_gdn_gating(a_log, case.g[1], case.beta[1], dt_bias)
    for row, whole in zip(rows, (g, beta), strict=True):
        assert row.shape == (1, 33, 6)
        assert same_bits(row, whole[1:])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": np.zeros(4)}, ContractError, r"`a` must be \[T, Hv\] or \[B, T, Hv\], got 1 axes: \[4\]"),
        ({"a": np.zeros((1, 1, 3, 4))}, ContractError, r"`a` must be .* got 4 axes: \[1, 1, 3, 4\]"),
        ({"b": np.zeros((3, 5))}, ContractError, r"`b` must be \[T, Hv\] = \[3, 4\], got \[3, 5\]"),
        ({"a": np.zeros((1, 3, 4))}, ContractError, r"`b` must be \[B, T, Hv\] = \[1, 3, 4\], got \[3, 4\]"),
        ({"A_log": np.zeros(3)}, ContractError, r"`A_log` must be \[Hv\] = \[4\], got \[3\]"),
        ({"dt_bias": np.zeros((1, 4))}, ContractError, r"`dt_bias` must be \[Hv\] = \[4\], got \[1, 4\]"),
        ({"A_log": None}, DtypeError, r"`A_log` must be a NumPy array, got builtins.NoneType"),
        ({"b": None}, DtypeError, r"`b` must be a NumPy array"),
        ({"a": np.zeros((3, 4), int)}, DtypeError, r"`a` must be float16, bfloat16, float32 or float64, got int64"),
        ({"b": np.zeros((3, 4), bool)}, DtypeError, r"`b` must be float16, .*, got bool"),
    ],
)
def test_gating_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"A_log": np.zeros(4), "a": np.zeros((3, 4)), "b": np.zeros((3, 4)), "dt_bias": np.zeros(4)}
    with pytest.raises(error, match=f"^fused_gdn_gating: {message}"):
        fused_gdn_gating(**{**call, **changes})
