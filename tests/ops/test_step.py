"""The prepared step: the recurrent function's bits, the state in place, and refusals of what was not prepared."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import ContractError, DtypeError, RecurrentStep, fused_recurrent_gated_delta_rule
from judge import same_bits
from reference import Case, make_case


def prepared(case: Case, state: np.ndarray, **options: Any) -> RecurrentStep:
    return RecurrentStep(case.q, case.k, case.v, case.g, case.beta, state, **options)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("t", [1, 4])
def test_steps_have_the_bits_of_the_function(dtype: Any, state_v_first: bool, t: int) -> None:
    case = make_case(0, t=t, heads=(2, 4), dims=(24, 40), batch=3)
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": state_v_first}
    state = np.ascontiguousarray(case.state.swapaxes(2, 3)) if state_v_first else case.state.copy()
    expected_state = state.copy()
    for threads in (1, 2):
        step = prepared(half, state, threads=threads, **options)
        for call in range(3):
            v = (half.v.astype(np.float32) * (call + 1)).astype(dtype)
            out = step(half.q, half.k, v, half.g, half.beta, state)
            expected, expected_state = fused_recurrent_gated_delta_rule(
                half.q,
                half.k,
                v,
                g=half.g,
                beta=half.beta,
                initial_state=expected_state,
                output_final_state=True,
                **options,
            )
            assert same_bits(out, expected)
            assert same_bits(state, expected_state)


def test_other_states_and_strides_may_follow() -> None:
    case = make_case(1, t=2, heads=(1, 2), dims=(16, 32))
    step = prepared(case, case.state.copy())
    first = step(case.q, case.k, case.v, case.g, case.beta, case.state.copy())
    turned = {name: np.asfortranarray(getattr(case, name)) for name in ("q", "k", "v", "g", "beta")}
    pool = np.full((1, 5, 16, 32), np.nan, np.float32)
    pool[:, 1:3] = case.state
    second = step(*turned.values(), pool[:, 1:3])
    assert same_bits(first, second)
    assert np.isnan(pool[:, [0, 3, 4]]).all()


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (
            "q",
            lambda x: x[:, :1],
            ContractError,
            r"`q` must be as prepared, \[1, 2, 1, 16\] float32, got \[1, 1, 1, 16\]",
        ),
        ("v", lambda x: x.astype(np.float16), ContractError, r"`v` must be as prepared, .* float32, got .* float16"),
        ("beta", lambda x: x.tolist(), DtypeError, r"`beta` must be a NumPy array, got builtins.list"),
        ("state", lambda x: x[0], ContractError, r"`state` must be as prepared, \[1, 2, 16, 16\] float32, got \[2, 16"),
        ("state", lambda x: x.swapaxes(2, 3), ContractError, r"`state` must have adjacent elements .* stride of 64"),
        ("state", lambda x: np.broadcast_to(x, x.shape), ContractError, r"`state` must be writable"),
    ],
)
def test_calls_are_compared_with_what_was_prepared(name: str, change: Any, error: Any, message: str) -> None:
    case = make_case(2, t=2, heads=(1, 2), dims=(16, 16))
    step = prepared(case, case.state.copy())
    arrays = {n: getattr(case, n) for n in ("q", "k", "v", "g", "beta", "state")}
    with pytest.raises(error, match="RecurrentStep: " + message):
        step(**{**arrays, name: change(arrays[name])})


def test_preparing_checks_the_contract() -> None:
    case = make_case(3, t=2, heads=(1, 2), dims=(16, 16))
    for name, value, message in (
        ("k", case.k[..., :3], "`k` must be"),
        ("g", None, "`g` must be a NumPy array"),
        ("beta", case.beta[:, :1], "`beta` must be"),
        ("state", case.state.astype(np.float64), "`state` must be float32"),
        ("state", case.state[:, :1], "`initial_state` must be|`state` must be"),
    ):
        arrays = {n: getattr(case, n) for n in ("q", "k", "v", "g", "beta", "state")} | {name: value}
        with pytest.raises(ContractError, match=message):
            RecurrentStep(**arrays)
    with pytest.raises(ContractError, match="`threads` must be from 1"):
        prepared(case, case.state, threads=0)
