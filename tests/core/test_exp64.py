"""exp out of plain operations."""

import math

import numpy as np

from cgdr_numba.core.exp64 import exp64, exp64_of
from cgdr_numba.core.jit import kernel

compiled_exp64 = kernel(exp64)


def test_within_one_ulp_of_the_true_value() -> None:
    rng = np.random.default_rng(1)
    for x in np.concatenate(
        [rng.uniform(-700, 700, 2000), rng.uniform(-1, 1, 2000), rng.uniform(-40, 0, 2000)]
    ).tolist():
        true = math.exp(x)
        assert abs(exp64(x) - true) <= 1.5 * math.ulp(true), x


def test_edges() -> None:
    assert exp64(0.0) == exp64(-0.0) == 1.0
    assert exp64(-math.inf) == exp64(-1e300) == exp64(-746.0) == 0.0
    assert exp64(math.inf) == exp64(710.0) == exp64(1e300) == math.inf
    assert math.isnan(exp64(math.nan))
    assert math.isclose(exp64(709.7), math.exp(709.7), rel_tol=1e-15)
    assert exp64(-745.1) == math.exp(-745.1) > 0.0


def test_compiled_and_plain_give_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    for x in np.concatenate([rng.uniform(-750, 715, 3000), [math.inf, -math.inf, 0.0, 5e-324, -5e-324]]).tolist():
        assert compiled_exp64(x) == exp64(x), x
    assert math.isnan(compiled_exp64(math.nan))


def test_arrays_have_the_bits_of_their_elements() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(-750, 715, 3000), [math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e300, -746.0, 710.0]])
    with np.errstate(over="ignore"):
        assert exp64_of(x).tolist() == [exp64(value) for value in x.tolist()]
    assert np.isnan(exp64_of(np.array([math.nan, 0.0]))).tolist() == [True, False]
    half = np.array([[-1.5], [0.25]], np.float16)
    assert exp64_of(half).tolist() == [[exp64(-1.5)], [exp64(0.25)]]
