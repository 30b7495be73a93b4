"""The vector and scalar vocabulary, one operation at a time."""

import math

import numpy as np
import pytest

from cgdr_numba.core.dtypes import FP16, as_words
from cgdr_numba.core.faithful import vector_ops as ops
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.fma import exact_fma, fma
from cgdr_numba.core.faithful.scalar_ops import scalar_exp
from cgdr_numba.core.faithful.wide_dot import plain_wide_dot, wide_dot

F32 = np.float32
SATURATE, FUSED = Arith(fused=False, saturate=True), Arith(fused=True, saturate=False)
MAX = np.finfo(F32).max


@pytest.fixture(autouse=True)
def silent_overflow():
    """NumPy scalars warn where compiled kernels do not; the workers turn that off, and so does this module."""
    with np.errstate(all="ignore"):
        yield


def rows(*values: list[float]) -> np.ndarray:
    return np.array(values, F32)


def test_row_operations_touch_their_lanes_only() -> None:
    y, x = rows([9, 9, 9], [9, 9, 9]), rows([1, 2, 3], [4, 5, 6])
    ops.muls(y, 1, x, F32(2), 2, None)
    assert y.tolist() == [[9, 9, 9], [8, 10, 9]]
    ops.add(y, 1, x, 3, None)
    assert y.tolist() == [[9, 9, 9], [12, 15, 15]]
    ops.sub(y, 1, x, 1, None)
    assert y.tolist() == [[9, 9, 9], [11, 15, 15]]
    ops.duplicate(y, 0, F32(7), 2)
    assert y.tolist() == [[7, 7, 9], [11, 15, 15]]


def test_axpy_chain_adds_in_ascending_order_with_two_roundings() -> None:
    y = rows([1.0])
    # 2^-25 is lost against 1 one at a time; added up first, four of them would count.
    ops.axpy_chain(y, 0, np.full(4, 2.0**-25, F32), np.ones((4, 1), F32), 1, None)
    assert y[0, 0] == 1.0
    a, x, y0 = F32(1 + 2.0**-12), F32(1 + 2.0**-12), F32(-1)
    results = {}
    for name, arith in {"two": None, "one": FUSED}.items():
        y = rows([y0])
        ops.axpy_chain(y, 0, np.array([a]), rows([x]), 1, arith)
        results[name] = float(y[0, 0])
    assert results == {"two": 2.0**-11, "one": 2.0**-11 + 2.0**-24}


def test_axpy_prefixes_grow_and_read_finished_rows() -> None:
    matrix = rows([0, 0, 0], [2, 0, 0], [3, 5, 0])
    ops.axpy_prefixes(matrix, 2, rows([3, 5, 0])[0], None)
    assert matrix.tolist() == [[0, 0, 0], [2, 0, 0], [3 + 5 * 2, 5, 0]]


def test_saturation_acts_on_every_vector_result() -> None:
    y = rows([MAX, -MAX, 1.0, 0.0])
    ops.muls(y, 0, y, F32(4), 4, SATURATE)
    assert y.tolist() == [[MAX, -MAX, 4.0, 0.0]]
    y = rows([np.inf, np.nan])
    ops.muls(y, 0, y, F32(1), 2, SATURATE)
    assert y.tolist() == [[MAX, 0.0]]
    y = rows([1.0])
    ops.axpy_chain(y, 0, np.array([MAX], F32), rows([MAX]), 1, SATURATE)
    assert y.tolist() == [[MAX]]
    y = rows([0.0])
    ops.exp(y, 0, rows([200.0]), 1, SATURATE)
    assert y.tolist() == [[MAX]]


def tree(values: np.ndarray) -> np.ndarray:
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


@pytest.mark.parametrize("n", [1, 16, 63, 64, 65, 127, 128, 129, 320, 512])
def test_dot_sums_groups_by_a_tree_then_the_tail_in_order(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((2, n)).astype(F32)
    products, total = a * b, F32(0)
    for r in range(n // 64):
        total = total + tree(products[64 * r : 64 * r + 64])
    for lane in range(n // 64 * 64, n):
        total = total + products[lane]
    assert ops.dot(a, b, np.full(max(n, 64), np.nan, F32), None) == total


def test_dot_order_shows_in_the_bits() -> None:
    """One large product next to 63 small ones: pairs differ from running sums."""
    a, b = np.full(64, 2.0**-24, F32), np.ones(64, F32)
    a[0] = 1.0
    sequential = F32(0)
    for product in a * b:
        sequential = sequential + product
    assert sequential == 1.0
    assert ops.dot(a, b, np.empty(64, F32), None) == tree(a * b) > 1.0


def test_dot_saturates_products_and_tree_but_not_the_scalar_sums() -> None:
    a = np.full(128, MAX, F32)
    assert ops.dot(a, a, np.empty(128, F32), SATURATE) == np.inf
    assert ops.dot(a[:64], a[:64], np.empty(64, F32), SATURATE) == MAX


def test_exp_is_the_float32_nearest_to_exp() -> None:
    xs = np.linspace(-110, 90, 4001, dtype=F32)
    y = np.empty((1, len(xs)), F32)
    ops.exp(y, 0, xs[np.newaxis], len(xs), None)
    assert np.array_equal(y[0], np.exp(xs.astype(np.float64)).astype(F32))
    special = np.array([[0, -np.inf, np.inf, np.nan]], F32)
    y = np.empty((1, 4), F32)
    ops.exp(y, 0, special, 4, None)
    assert y[0, :3].tolist() == [1.0, 0.0, np.inf]
    assert np.isnan(y[0, 3])


def test_scalar_exp_error_doubles_with_every_halving() -> None:
    for limit, bound in ((8, 2.7e-6), (32, 1.1e-5), (87.3, 2.4e-5)):
        xs = np.linspace(-limit, 0, 500, dtype=F32)
        errors = [abs(float(scalar_exp(x)) / math.exp(x) - 1) for x in xs]
        assert max(errors) <= bound


def test_scalar_exp_edges() -> None:
    assert scalar_exp(F32(0)) == scalar_exp(F32(-0.0)) == 1.0
    assert scalar_exp(F32(np.inf)) == np.inf
    assert scalar_exp(F32(-np.inf)) == 0.0
    assert scalar_exp(MAX) == np.inf
    assert scalar_exp(-MAX) == 0.0
    assert np.isnan(scalar_exp(F32(np.nan)))
    # The reciprocal of an overflowed square is 0, where a correctly rounded exp still has subnormals.
    assert scalar_exp(F32(-90)) == 0.0 < np.exp(np.float64(-90)).astype(F32)


def test_fma_twin_equals_the_intrinsic() -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, (3000, 3), dtype=np.uint32).view(F32)
    near = rng.standard_normal((3000, 3)).astype(F32)
    near[:, 2] = -(near[:, 0] * near[:, 1]) * (1 + rng.integers(-2, 3, 3000) * F32(2.0**-23))
    for a, x, y in np.concatenate([bits, near]):
        one, other = fma(a, x, y), exact_fma(a, x, y)
        assert one == other or (np.isnan(one) and np.isnan(other)), (a, x, y)
        assert np.signbit(one) == np.signbit(other) or np.isnan(one), (a, x, y)


@pytest.mark.parametrize(
    ("arith", "expected"), [(None, [np.inf, -np.inf, np.nan, 1.5]), (SATURATE, [65504, -65504, 0, 1.5])]
)
def test_cast_overflow(arith: Arith | None, expected: list[float]) -> None:
    out = np.zeros(4, np.float16)
    for value, words in zip(rows([1e6, -np.inf, np.nan, 1.5])[0], as_words(out), strict=True):
        ops.cast_out(value, FP16, words, arith)
    np.testing.assert_array_equal(out.astype(np.float64), expected)


@pytest.mark.parametrize("n", [1, 16, 63, 64, 65, 128, 130, 200])
def test_sixteen_dots_side_by_side_have_the_bits_of_one(n: int) -> None:
    rng = np.random.default_rng(n)
    k, a = rng.standard_normal((20, n)).astype(F32), rng.standard_normal(n).astype(F32)
    for n_rows in (16, 5):
        columns, sums, plain = np.full(n * 16, np.nan, F32), np.empty(16, F32), np.empty(16, F32)
        ops.transpose(k, 3, n_rows, n, columns)
        wide_dot(a, columns, n, sums)
        plain_wide_dot(a, columns, n, plain)
        expected = [ops.dot(a, k[3 + j], np.empty(max(n, 64), F32), None) for j in range(n_rows)]
        assert sums.tolist() == plain.tolist() == expected + [0.0] * (16 - n_rows)
