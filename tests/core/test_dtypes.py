"""Element words: exact widening, rounding to nearest even."""

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.core import dtypes
from cgdr_numba.core.jit import kernel

HALF, BF16, SINGLE, DOUBLE = np.float16, ml_dtypes.bfloat16, np.float32, np.float64
widen, narrow = dtypes.widen, dtypes.narrow


@kernel
def widen_all(words, kind, out):
    for i in range(len(out)):
        out[i] = widen(words[i], kind)


@kernel
def narrow_all(values, kind, words):
    for i in range(len(values)):
        narrow(values[i], kind, words[i])


def interesting_floats(n_random: int) -> np.ndarray:
    """Random bit patterns, every 16-bit prefix, ties of float16 and their neighbours, the limits."""
    rng = np.random.default_rng(7)
    half = np.arange(0x7C00, dtype=np.uint16).view(HALF).astype(np.float64)
    ties = ((half[:-1] + half[1:]) / 2).astype(np.float32)
    step = max(1, len(ties) * 8 // max(n_random, 1))
    ties = ties[::step]
    parts = [
        rng.integers(0, 2**32, n_random, dtype=np.uint32).view(SINGLE),
        (rng.integers(0, 65536, n_random, dtype=np.uint32) << 16).view(SINGLE),
        ((rng.integers(0, 65536, n_random, dtype=np.uint32) << 16) + 0x8000).view(SINGLE),
        ties,
        -ties,
        np.nextafter(ties, SINGLE(np.inf)),
        np.nextafter(ties, SINGLE(0)),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2.0**-25, 2.0**-24, 1e-45], SINGLE),
        np.array([3.3895314e38, 3.3961775e38, 3.4028235e38], SINGLE),
    ]
    return np.concatenate(parts)


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    """Equal bits, any NaN for any NaN."""
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(left.astype(np.float64), right.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(left[left == left]), np.signbit(right[right == right]))


@pytest.mark.parametrize(("dtype", "kind"), [(HALF, dtypes.FP16), (BF16, dtypes.BF16)])
def test_widening_is_exact_for_every_pattern(dtype, kind: int, n_examples: int) -> None:
    values = np.arange(0, 65536, max(1, 65536 // n_examples), dtype=np.uint16).view(dtype)
    out = np.full(len(values), np.nan, SINGLE)
    widen_all(dtypes.as_words(values), kind, out)
    with np.errstate(invalid="ignore"):
        assert_same(out, values.astype(SINGLE))


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE, DOUBLE])
def test_narrowing_rounds_to_nearest_even(dtype, n_examples: int) -> None:
    values = interesting_floats(n_examples)
    out = np.zeros(len(values), dtype)
    with np.errstate(all="ignore"):
        narrow_all(values, dtypes.KINDS[np.dtype(dtype)], dtypes.as_words(out))
        assert_same(out, values.astype(dtype))


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_wide_elements_round_to_float32(dtype, n_examples: int) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(n_examples) * 10.0 ** rng.integers(-45, 39, n_examples)).astype(dtype)
    out = np.zeros(len(values), SINGLE)
    with np.errstate(all="ignore"):
        widen_all(dtypes.as_words(values), dtypes.KINDS[np.dtype(dtype)], out)
        assert_same(out, values.astype(SINGLE))


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE, DOUBLE])
def test_words_are_a_view_for_any_strides(dtype) -> None:
    base = np.arange(120).reshape(4, 5, 6).astype(dtype)
    for array in (base, base.T, base[::-1, ::2], np.asfortranarray(base), np.broadcast_to(base[:1], (7, 5, 6))):
        words = dtypes.as_words(array)
        assert words.shape == (*array.shape, base.itemsize // 2)
        assert np.shares_memory(words, array)
        assert np.array_equal(np.ascontiguousarray(words).view(dtype)[..., 0], array)


def test_golden_rounds_to_bfloat16_once() -> None:
    """1 + 2^-8 is a tie that 2^-40 breaks; float32 in between would lose the 2^-40 and round to even."""
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40, -1 - 2.0**-8 - 2.0**-40])
    rounded = dtypes.round_to(values, dtypes.BFLOAT16).astype(np.float64)
    assert rounded.tolist() == [1 + 2.0**-7, 1.0, 1 + 2.0**-7, -1 - 2.0**-7]
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 1e300, 3.39e38])
    with np.errstate(over="ignore"):
        assert dtypes.round_to(special, dtypes.BFLOAT16).astype(np.float64).tolist()[:2] == [np.inf, -np.inf]
    plain = np.random.default_rng(0).standard_normal(1000).astype(np.float32).astype(np.float64)
    assert_same(dtypes.round_to(plain, dtypes.BFLOAT16), plain.astype(np.float32).astype(BF16))


def test_numbers_beyond_float32_become_infinite() -> None:
    """Also where rounding to nearest would still give the largest float32."""
    largest = float(np.finfo(SINGLE).max)
    assert [dtypes.single(x) for x in (1e300, -1e300, np.inf, largest, 0.1)] == [
        np.inf,
        -np.inf,
        np.inf,
        largest,
        SINGLE(0.1),
    ]
    assert np.isnan(dtypes.single(np.nan))
