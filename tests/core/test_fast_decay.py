"""Gates of a chunk of the fast backend: running sums, decays out of them, scores with decay; against NumPy float64."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.dtypes import FP32, FP64, KINDS, as_words
from cgdr_numba.core.fast import decay
from cgdr_numba.core.fast.decay import HIGHEST_RISE, LOWEST_FACTOR, LOWEST_GATE, Gates

F32, F64 = np.float32, np.float64
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(autouse=True)
def silent_overflow():
    """What means nothing may overflow."""
    with np.errstate(all="ignore"):
        yield


def no_gates() -> Gates:
    """Rows that hold NaN."""
    return Gates(np.full(C, np.nan), *np.full((5, C), np.nan, F32))


def filled(g: Any, beta: Any = None) -> tuple[Gates, bool]:
    """Rows out of float64 gates, and what load_gates says."""
    values = np.asarray(g, F64)
    weights = np.ones(len(values)) if beta is None else np.asarray(beta, F64)
    gates = no_gates()
    answer = decay.load_gates(as_words(values), as_words(weights), (FP64, FP64), gates)
    return gates, bool(answer)


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How far float32 numbers are from exact ones, in units of the last place of the float32 nearest to those."""
    return np.abs(actual.astype(F64) - exact) / np.spacing(np.abs(exact.astype(F32))).astype(F64)


def test_exp32_is_within_an_ulp(n_examples: int) -> None:
    x = np.concatenate([np.linspace(-105, 80, n_examples), np.geomspace(1e-30, 80, 500), -np.geomspace(1e-30, 87, 500)])
    assert ulps(np.array([decay.exp32(value) for value in x]), np.exp(x)).max() <= 1


def test_exp32_at_its_ends() -> None:
    assert decay.exp32(0.0) == decay.exp32(-0.0) == 1
    for x in (-110.0, -700.0, -16000.0, -1e300, -np.inf):
        assert decay.exp32(x) == 0


@pytest.mark.parametrize("n", [1, 2, 7, 15, 16])
@pytest.mark.parametrize("beta_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_load_gates(dtype: Any, beta_dtype: Any, n: int) -> None:
    rng = np.random.default_rng([n, 5])
    for spread in (0.01, 1.0, 40.0):
        g = (-spread * rng.exponential(size=n) + 0.1 * spread * (rng.random(n) < 0.2)).astype(dtype)
        beta = rng.uniform(-1, 2, n).astype(beta_dtype)
        gates = no_gates()
        kinds = (KINDS[np.dtype(dtype)], KINDS[np.dtype(beta_dtype)])
        assert decay.load_gates(as_words(g), as_words(beta), kinds, gates)
        sums = np.cumsum(g.astype(F32).astype(F64))
        assert np.array_equal(gates.sums[:n], sums), "float64 sums of float32 gates"
        assert np.array_equal(gates.beta[:n], beta.astype(F32))
        assert ulps(gates.decay[:n], np.exp(sums)).max() <= 1
        assert np.array_equal(gates.pull[:n], gates.beta[:n] * gates.decay[:n])
        assert ulps(gates.rest[:n], np.exp(sums[-1] - sums)).max() <= 1
        growth = np.exp(-np.where(sums > LOWEST_FACTOR, sums, 0))
        assert ulps(gates.growth[:n], growth).max() <= 1
        assert all(np.isnan(row[n:]).all() for row in gates), "rows beyond the tokens"


def test_gates_lie_anywhere_in_memory() -> None:
    g, beta = -np.random.default_rng(1).random((2, 9)).astype(F32)
    expected = no_gates()
    assert decay.load_gates(as_words(g), as_words(beta), (FP32, FP32), expected)
    moved = np.frombuffer(b"?" + g[::-1].tobytes(), np.uint8)[1:].view(F32)[::-1]
    actual = no_gates()
    assert decay.load_gates(as_words(moved), as_words(np.repeat(beta, 3)[::3]), (FP32, FP32), actual)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize(
    ("g", "usable"),
    [
        ([0.0], True),
        ([-1e30, -1.0, -1e30], True),
        ([-3.4e38], True),
        ([HIGHEST_RISE], True),
        ([5.0, -500.0, 5.0], True),
        ([5.0, -500.0, 5.5], False),
        ([np.nextafter(HIGHEST_RISE, 99)], True),
        ([HIGHEST_RISE + 1e-4], False),
        ([1e30], False),
        ([-np.inf], False),
        ([np.inf], False),
        ([-1.0, np.nan, -1.0], False),
        ([-1e300], False),
        ([1e300, -1e300], False),
    ],
)
def test_which_gates_have_differences(g: list[float], usable: bool) -> None:
    """Infinite ones have none (a float64 beyond float32 counts as infinite), nor do gates that grow beyond e^10."""
    gates, answer = filled(g)
    assert answer == usable
    if usable:
        assert all(np.isfinite(row[: len(g)]).all() for row in gates)


def test_huge_gates_count_as_the_lowest() -> None:
    gates, _ = filled([-0.5, -1e30, -0.25, -1e5, -0.125])
    expected = np.cumsum([-0.5, LOWEST_GATE, -0.25, LOWEST_GATE, -0.125])
    assert np.array_equal(gates.sums[:5], expected)
    np.testing.assert_array_equal(gates.decay[:5], np.array([np.exp(-0.5), 0, 0, 0, 0], F32))
    np.testing.assert_array_equal(gates.rest[:5], np.array([0, 0, 0, np.exp(-0.125), 1], F32))


def test_lowest_sum() -> None:
    gates, _ = filled([0.5, -3.0, 1.0, -9.0, 8.0])
    assert [decay.lowest(gates, n) for n in range(1, 6)] == [0, -2.5, -2.5, -10.5, -10.5]


GATES = {
    "no gates": np.zeros(C),
    "mild": np.full(C, -0.1),
    "short of the factors' end": np.full(C, -59.9 / C),
    "beyond the factors' end": np.full(C, -60.1 / C),
    "steep": np.full(C, -20.0),
    "growing": np.full(C, 9.9 / C),
    "both": np.tile([1.2, -9.0], C // 2),
    "model": -np.exp(np.random.default_rng(4).uniform(np.log(1e-4), np.log(316), C)),
    "one that forgets": np.where(np.arange(C) == 5, -1e30, -0.5),
}


@pytest.mark.parametrize("n", [1, 2, 5, 15, 16])
@pytest.mark.parametrize("name", GATES)
def test_decay_scores(name: str, n: int) -> None:
    rng = np.random.default_rng([n, 6])
    kk, qk = np.full((2, n, C), np.nan, F32)
    kk[:, :n], qk[:, :n] = rng.standard_normal((2, n, n))
    gates, usable = filled(GATES[name][:n], rng.uniform(0, 1, n))
    assert usable
    b, m = np.full((2, C, C), np.nan, F32)
    decay.decay_scores(kk, qk, gates, b, m)
    between = np.exp(gates.sums[:n, None] - gates.sums[:n])
    below, on = np.tri(n, k=-1, dtype=bool), np.tri(n, dtype=bool)
    expected_b = -gates.beta[:n, None].astype(F64) * between * kk[:, :n]
    expected_m = between * qk[:, :n]
    # Two exponentials within an ulp, and three products.
    np.testing.assert_allclose(b[:n, :n][below], expected_b[below], rtol=5e-7, atol=1e-44)
    np.testing.assert_allclose(m[:n, :n][on], expected_m[on], rtol=5e-7, atol=1e-44)
    assert np.isnan(b[n:]).all()
    assert np.isnan(m[n:]).all()


def test_rows_of_scores_depend_on_earlier_tokens_alone() -> None:
    """Within the range of factors, tokens that follow change no bit of the rows before."""
    rng = np.random.default_rng(8)
    kk, qk = rng.standard_normal((2, C, C)).astype(F32)
    gates, _ = filled(GATES["mild"], rng.uniform(0, 1, C))
    b, m = np.full((2, C, C), np.nan, F32)
    decay.decay_scores(kk, qk, gates, b, m)
    for n in (1, 6, 15):
        fewer, _ = filled(GATES["mild"][:n], gates.beta[:n])
        some_b, some_m = np.full((2, C, C), np.nan, F32)
        decay.decay_scores(kk[:n], qk[:n], fewer, some_b, some_m)
        on = np.tri(n, dtype=bool)
        assert np.array_equal(some_b[:n, :n][on], b[:n, :n][on])
        assert np.array_equal(some_m[:n, :n][on], m[:n, :n][on])


@pytest.mark.parametrize(
    ("beta", "usable"), [(1024.0, True), (-1024.0, True), (1025.0, False), (np.inf, False), (np.nan, False)]
)
def test_large_betas_have_no_differences(beta: float, usable: bool) -> None:
    assert filled([-1.0, -2.0], np.array([0.5, beta]))[1] == usable
