"""q and k made ready: lengths, products, and bits that depend on Dk alone."""

import numpy as np
import pytest

from cgdr_numba.core.fast.pairs import prepare_pairs

F32 = np.float32


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def prepared(q: np.ndarray, k: np.ndarray, normalise: bool, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and k . q, in arrays whose rows have a gap behind them."""
    pages = np.full((2, len(q), q.shape[1] + 3), np.nan, F32)
    rows, products = pages[:, :, :-3], np.full(len(q) + 1, -7.0, F32)
    rows[0], rows[1] = q, k
    with np.errstate(all="ignore"):
        prepare_pairs(rows[0], rows[1], normalise, F32(scale), products)
    assert np.isnan(pages[:, :, -3:]).all()
    assert products[-1] == -7.0
    return rows[0], rows[1], products[:-1]


@pytest.mark.parametrize(("n", "dk"), [(1, 1), (3, 5), (16, 16), (5, 37), (64, 128), (2, 130)])
@pytest.mark.parametrize("normalise", [False, True])
def test_against_float64(n: int, dk: int, normalise: bool) -> None:
    q, k = 3 * random(2, n, dk)
    wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
    if normalise:
        wide_q, wide_k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (wide_q, wide_k))
    wide_q *= -0.3
    got_q, got_k, products = prepared(q, k, normalise, -0.3)
    np.testing.assert_allclose(got_q, wide_q, rtol=6e-7)
    np.testing.assert_allclose(got_k, wide_k, rtol=6e-7)
    size = np.linalg.norm(wide_q, axis=1) * np.linalg.norm(wide_k, axis=1)
    assert (np.abs(products - (wide_q * wide_k).sum(1)) <= 1e-6 * size).all()
    if not normalise:
        assert np.array_equal(got_k, k)


@pytest.mark.parametrize("normalise", [False, True])
def test_rows_do_not_depend_on_their_mates(normalise: bool) -> None:
    q, k = random(2, 9, 37)
    together = prepared(q, k, normalise, 0.5)
    for i in range(9):
        for part, alone in zip(together, prepared(q[i : i + 1], k[i : i + 1], normalise, 0.5), strict=True):
            assert np.array_equal(part[i], alone[0])


def test_t100_zero_stays_zero_and_t101_large_is_normalised() -> None:
    zeros, large = np.zeros((1, 128), F32), np.full((1, 128), 300, F32)
    q, k, products = prepared(zeros, zeros, True, 1.0)
    for x in (q, k, products):
        assert not x.any()
    q, k, products = prepared(large, large, True, 1.0)
    np.testing.assert_allclose(k, 128**-0.5, rtol=1e-6)
    np.testing.assert_allclose(products, 1.0, rtol=1e-6)


def test_keys_whose_squares_leave_float32_become_zero() -> None:
    huge = np.full((1, 20), 1e20, F32)
    q, k, products = prepared(huge, huge, True, 1.0)
    for x in (q, k, products):
        assert not x.any()
