"""Relative rms, largest differences, and what they are where there is little to compare."""

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.errors import ContractError
from cgdr_numba.parity.metrics import BOUNDS, abs_difference, bound_of, compare_out, compare_state, relative_rms
from reference import make_case, token_loop

INF, NAN = np.inf, np.nan


def test_bounds_are_those_promised() -> None:
    assert BOUNDS == {"float16": 4e-4, "bfloat16": 3.2e-3, "float32": 1e-6, "float64": 1e-6}
    assert bound_of(np.zeros(1, ml_dtypes.bfloat16)) == 8 * bound_of(np.zeros(1, np.float16))


@pytest.mark.parametrize(
    ("actual", "expected", "value"),
    [
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([-3.0, -4.0], [3.0, 4.0], 2.0),
        ([0.0, 0.0], [0.0, -0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], INF),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([3.0, 4.0], [NAN, 4.0], INF),
        ([3.0, INF], [3.0, -INF], INF),
        ([INF, 5.0], [1.0, 4.0], INF),
        ([INF, NAN, 3.0, 5.0], [INF, NAN, 3.0, 4.0], 0.2),
        ([1.0, 0.0], [NAN, 0.0], INF),
        ([3e200, 5e200], [3e200, 4e200], 0.2),
        ([3e-200, 5e-200], [3e-200, 4e-200], 0.2),
    ],
)
def test_t139_relative_rms_by_hand(actual: list[float], expected: list[float], value: float) -> None:
    assert relative_rms(np.array(actual), np.array(expected)) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("actual", "expected"), [([], []), ([NAN, INF], [NAN, INF])])
def test_t140_nothing_to_compare_is_no_value(actual: list[float], expected: list[float]) -> None:
    assert np.isnan(relative_rms(np.array(actual), np.array(expected)))


def test_differences_are_taken_in_float64() -> None:
    half = np.array([2048.0, 65504.0], np.float16)
    single = np.array([2048.5, -65504.0], np.float32)
    assert abs_difference(half, single).tolist() == [0.5, 131008.0]


def test_out_is_compared_by_sequence_and_head() -> None:
    expected = np.arange(1.0, 25.0).reshape(6, 2, 2)
    actual = expected.copy()
    actual[4, 1, 0] += 3.5
    found = compare_out(actual, expected, [2, 0, 3, 1])
    wrong = 3.5 / np.sqrt((expected[2:5, 1] ** 2).sum())
    assert found.relative_rms == pytest.approx(np.array([[0, 0], [NAN, NAN], [0, wrong], [0, 0]]), nan_ok=True)
    assert (found.worst, found.worst_at) == (pytest.approx(wrong), (2, 1))
    assert (found.max_abs, found.max_abs_at, found.actual, found.expected) == (3.5, (4, 1, 0), 22.5, 19.0)


def test_state_is_compared_by_sequence_and_head() -> None:
    expected = np.ones((2, 3, 4, 5))
    actual = expected.copy()
    actual[1, 2, 3, 4] = NAN
    found = compare_state(actual, expected)
    assert (found.worst, found.worst_at, found.max_abs, found.max_abs_at) == (INF, (1, 2), INF, (1, 2, 3, 4))
    assert np.isnan(found.actual)


def test_t140_empty_results_have_no_worst() -> None:
    found = compare_out(np.zeros((0, 2, 4)), np.zeros((0, 2, 4)), [0, 0])
    assert (found.worst, found.worst_at, found.max_abs_at) == (None, None, None)
    assert found.as_dict()["relative_rms"] == [[None, None], [None, None]]
    none = compare_state(np.zeros((0, 2, 4, 4)), np.zeros((0, 2, 4, 4)))
    assert (none.worst, none.worst_at, none.relative_rms.shape) == (None, None, (0, 2))


def test_t137_one_wrong_head_of_many_shows() -> None:
    expected = np.random.default_rng(137).standard_normal((16, 32, 8))
    actual = expected.copy()
    actual[:, 17] *= -1
    found = compare_out(actual, expected, [16])
    assert (found.worst, found.worst_at) == (pytest.approx(2.0), (0, 17))
    assert relative_rms(actual, expected) < 0.5


def test_t134_results_that_only_look_small_are_far_off() -> None:
    case = make_case(134, t=40, heads=(2, 4), dims=(24, 24), state=False)
    truth = token_loop(case)
    out, state = truth.out[0], truth.state
    outputs = (np.zeros_like(out), np.roll(out, 1, axis=1), np.roll(out, 1, axis=0), -out)
    assert all(found.worst > 0.9 for found in (compare_out(wrong, out, [40]) for wrong in outputs))
    assert compare_state(state.swapaxes(2, 3), state).worst > 0.9


@pytest.mark.parametrize("other", [(3, 2, 4), (2, 2, 5), (2, 8)])
def test_other_shapes_are_refused(other: tuple[int, ...]) -> None:
    expected = np.zeros((2, 2, 4))
    with pytest.raises(ContractError, match=r"`actual` must have the shape of `expected`, \[2, 2, 4\], got"):
        compare_out(np.zeros(other), expected, [2])
    with pytest.raises(ContractError, match=r"compare_state: `actual` must have the shape"):
        compare_state(np.zeros(other), expected)


def test_lengths_must_cover_the_tokens() -> None:
    with pytest.raises(ContractError, match="`lengths` must have the sum T = 2, got 3"):
        compare_out(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)), [1, 2])
