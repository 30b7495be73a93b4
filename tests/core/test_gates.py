"""Log decays and write strengths out of raw projections: values, ends of the range, bits."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy import special

from cgdr_numba.core.gates import RawGates, activate, log1p_of_fraction, sigmoid, softplus
from cgdr_numba.core.jit import kernel

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
EXTREMES = [0.0, -0.0, 5e-324, -1e-300, 1e-8, 20.0, 20.5, 88.8, 100.0, 709.9, 746.0, 1e30, 3e38, 1e300]


def points(n: int, seed: int = 0) -> np.ndarray:
    """Random arguments of every size, and the extreme ones with both signs."""
    rng = np.random.default_rng(seed)
    parts = [rng.uniform(-width, width, n) for width in (1e-3, 5, 40, 700)]
    return np.concatenate([*parts, EXTREMES, np.negative(EXTREMES)])


def softplus64(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid64(x: np.ndarray) -> np.ndarray:
    # scipy's expit gives 0 below -709, where float64 still holds e^x.
    y = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, y) / (1 + y)


def raw(g: Any = None, a_log: Any = None, dt_bias: Any = None, beta: Any = None, factor: float = 1.0) -> RawGates:
    return RawGates(g, a_log, dt_bias, beta, factor)


def test_log1p_is_within_two_ulp() -> None:
    rng = np.random.default_rng(1)
    for y in [*rng.uniform(0, 1, 2000).tolist(), *(10 ** rng.uniform(-320, 0, 500)).tolist(), 0.0, 5e-324, 1.0]:
        true = math.log1p(y)
        assert abs(log1p_of_fraction(y) - true) <= 2.5 * math.ulp(true), y
    assert math.isnan(log1p_of_fraction(math.nan))


def test_softplus_and_sigmoid_are_within_four_ulp() -> None:
    for x in points(600).tolist():
        true = softplus64(np.float64(x))
        assert abs(softplus(x) - true) <= 4 * np.spacing(true), x
        true = sigmoid64(np.float64(x))
        assert abs(sigmoid(x) - true) <= 4 * np.spacing(true), x


def test_ends_of_the_range() -> None:
    inf, nan = math.inf, math.nan
    assert [softplus(x) for x in (-inf, inf, 100.0, 1e300)] == [0.0, inf, 100.0, 1e300]
    assert softplus(-100.0) == pytest.approx(3.720075976020836e-44, rel=1e-15)
    assert [sigmoid(x) for x in (-inf, inf, 0.0, -0.0, -1e300)] == [0.0, 1.0, 0.5, 0.5, 0.0]
    assert sigmoid(-100.0) == pytest.approx(3.720075976020836e-44, rel=1e-15)
    assert math.isnan(softplus(nan))
    assert math.isnan(sigmoid(nan))


@pytest.mark.parametrize("function", [softplus, sigmoid])
def test_compiled_and_plain_give_the_same_bits(function: Any) -> None:
    compiled = kernel(getattr(function, "py_func", function))
    x = points(300, seed=2)
    g = x.reshape(1, -1, 1)
    vectors = activate(raw(beta=g) if function is sigmoid else raw(g, np.zeros(1)), F64)
    sign = 1 if function is sigmoid else -1
    for value, vector in zip(x.tolist(), next(iter(vectors.values())).ravel().tolist(), strict=True):
        assert compiled(value) == sign * vector, value


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 32), (3, 5, 7), (2, 0, 4)])
def test_values_are_those_of_float64_rounded_once(shape: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((2, *shape)) * 8).astype(dtype)
    a_log, dt_bias = rng.standard_normal((2, shape[2])).astype(dtype)
    rate, bias = (x.astype(np.float64) for x in (a_log, dt_bias))
    decay = -np.exp(rate) * softplus64(a.astype(np.float64) + bias)
    strength = special.expit(b.astype(np.float64))
    wide = activate(raw(a, a_log, dt_bias, b), F64)
    np.testing.assert_allclose(wide["g"], decay, rtol=2e-15)
    np.testing.assert_allclose(wide["beta"], strength, rtol=2e-15)
    single = activate(raw(a, a_log, dt_bias, b), F32)
    for name in ("g", "beta"):
        assert wide[name].dtype == F64
        np.testing.assert_array_equal(single[name], wide[name].astype(np.float32), strict=True)


def test_each_gate_alone_and_without_a_bias() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 2, 3, 4))
    a_log = rng.standard_normal(4)
    both = activate(raw(a, a_log, np.zeros(4), b), F32)
    only_g, only_beta, doubled = (activate(x, F32) for x in (raw(a, a_log), raw(beta=b), raw(beta=b, factor=2.0)))
    assert list(only_g) == ["g"]
    assert list(only_beta) == list(doubled) == ["beta"]
    np.testing.assert_array_equal(only_g["g"], both["g"])
    np.testing.assert_array_equal(only_beta["beta"], both["beta"])
    np.testing.assert_array_equal(doubled["beta"], 2 * both["beta"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_projections_neither_warn_nor_turn_into_nan(dtype: Any) -> None:
    a = np.array([-np.inf, np.inf, np.nan, -100, 100, 3e38, -3e38], dtype).reshape(1, 7, 1)
    g = activate(raw(a, np.zeros(1, dtype)), F32)["g"].ravel()
    np.testing.assert_array_equal(g, np.float32([-0.0, -np.inf, np.nan, -3.72007598e-44, -100, -3e38, -0.0]))
    assert np.signbit(g[[0, 6]]).all()
    beta = activate(raw(beta=a), F32)["beta"].ravel()
    np.testing.assert_array_equal(beta, np.float32([0, 1, np.nan, 3.72007598e-44, 1, 1, 0]))
    huge = activate(raw(a, np.full(1, 1000, dtype)), F32)["g"].ravel()
    np.testing.assert_array_equal(huge[[1, 3, 4, 5]], -np.inf)
    still = activate(raw(a, np.full(1, -np.inf, dtype)), F32)["g"].ravel()
    np.testing.assert_array_equal(still[[0, 3, 4, 5, 6]], 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_change_no_bit_and_inputs_stay(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 2, 6, 5)).astype(dtype)
    a_log, dt_bias = rng.standard_normal((2, 5)).astype(dtype)
    expected = activate(raw(a, a_log, dt_bias, b), F32)
    spread = np.empty((5, 4, 6), dtype)
    spread[:, ::2] = a.transpose(2, 0, 1)
    odd = np.frombuffer(b"x" + b.tobytes(), np.uint8)[1:].view(dtype).reshape(b.shape)
    weights = np.repeat(np.stack([a_log, dt_bias]), 2, axis=1)[:, ::2]
    inputs = (spread[:, ::2].transpose(1, 2, 0), weights[0], weights[1, ::-1][::-1], odd)
    before = [x.tobytes() for x in inputs]
    for x in inputs:
        x.flags.writeable = False
    actual = activate(raw(*inputs), F32)
    for name, gate in expected.items():
        np.testing.assert_array_equal(actual[name], gate)
        assert not any(np.shares_memory(actual[name], x) for x in inputs)
    assert [x.tobytes() for x in inputs] == before


def test_one_number_for_all_tokens_is_taken() -> None:
    one = np.broadcast_to(np.float32(0.5), (2, 3, 4))
    gates = activate(raw(one, np.zeros(4), None, one), F32)
    np.testing.assert_array_equal(gates["g"], np.full((2, 3, 4), -softplus64(np.float64(0.5)), np.float32))
    np.testing.assert_array_equal(gates["beta"], np.full((2, 3, 4), special.expit(0.5), np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lower_bound", [0.0, -5.0, -0.5])
def test_gates_of_channels(lower_bound: float, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    g, dt_bias = ((3 * rng.standard_normal(shape)).astype(dtype) for shape in ((2, 9, 3, 5), (3, 5)))
    a_log = rng.standard_normal(3).astype(dtype)
    x, rate = g.astype(np.float64) + dt_bias.astype(np.float64), np.exp(a_log.astype(np.float64))[:, None]
    expected = lower_bound * sigmoid64(rate * x) if lower_bound else -rate * softplus64(x)
    single = activate(RawGates(g, a_log, dt_bias, None, 1.0, lower_bound), F32)["g"]
    double = activate(RawGates(g, a_log, dt_bias, None, 1.0, lower_bound), F64)["g"]
    assert single.dtype == F32
    np.testing.assert_allclose(double, expected, rtol=1e-14)
    np.testing.assert_array_equal(single, double.astype(np.float32))


def test_no_rate_and_no_bias_are_1_and_0() -> None:
    g = np.array([[[[-1.0, 0.0, 100.0]]]])
    for lower_bound in (0.0, -5.0):
        bare = activate(RawGates(g, None, None, None, 1.0, lower_bound), F64)["g"]
        given = activate(RawGates(g, np.zeros(1), np.zeros((1, 3)), None, 1.0, lower_bound), F64)["g"]
        np.testing.assert_array_equal(bare, given)
