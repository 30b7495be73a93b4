"""How far results are from their reference: relative rms of every (sequence, head), in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.errors import ContractError

Array = NDArray[Any]

BOUNDS: Final = {"float16": 4e-4, "bfloat16": 3.2e-3, "float32": 1e-6, "float64": 1e-6}
"""Largest relative rms of a replayed recorded call at the worst (sequence, head), by the dtype of the result.

Rounding a result once costs about 2.1e-4 in float16 and 1.7e-3 in bfloat16, which hides what backends differ by.
float32 leaves room for their own arithmetic. float64 is golden, compared unrounded with references that are stored in
float32.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A result against its reference. An infinite number stands for a NaN or infinity on one side only."""

    relative_rms: NDArray[np.float64]
    """[N, H], one number a sequence (or slot) and head; NaN where there was nothing to compare."""
    max_abs: float
    """Largest absolute difference of single elements; 0 where there are none."""
    max_abs_at: tuple[int, ...] | None
    """Index of that element in the result; None where there are none."""
    actual: float | None
    """The result's element there."""
    expected: float | None
    """The reference's element there."""

    @property
    def worst(self) -> float | None:
        """Largest relative rms of all (sequence, head); None where nothing had a value."""
        at = self.worst_at
        return None if at is None else float(self.relative_rms[at])

    @property
    def worst_at(self) -> tuple[int, int] | None:
        """(sequence, head) of the largest relative rms, the first of equals."""
        if np.isnan(self.relative_rms).all():
            return None
        n, h = divmod(int(np.nanargmax(self.relative_rms)), self.relative_rms.shape[1])
        return n, h

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values; None stands for "no value"."""
        return {
            "worst": self.worst,
            "worst_at": self.worst_at,
            "relative_rms": [[None if np.isnan(x) else x for x in row] for row in self.relative_rms.tolist()],
            "max_abs": self.max_abs,
            "max_abs_at": self.max_abs_at,
            "actual": self.actual,
            "expected": self.expected,
        }


def abs_difference(actual: Array, expected: Array) -> NDArray[np.float64]:
    """Return |actual - expected| element by element, in float64.

    Equal elements, infinities included, and two NaNs differ by 0; a NaN or infinity on one side alone, and infinities
    of different sign, by infinity.

    Example:
        >>> abs_difference(np.array([1.5, np.nan, np.inf, np.nan]), np.array([1.0, np.nan, np.inf, 0.0])).tolist()
        [0.5, 0.0, 0.0, inf]
    """
    a, e = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    both_finite = np.isfinite(a) & np.isfinite(e)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(same, 0.0, np.where(both_finite, np.abs(a - e), np.inf))


def relative_rms(actual: Array, expected: Array) -> float:
    """Return sqrt(sum (actual - expected)^2 / sum expected^2), the error as a part of the reference's size.

    A zero reference gives 0 where the result is zero as well, and infinity otherwise. Elements whose non-finite values
    agree are left out of both sums; where they disagree the result is infinity. Where nothing is left to compare there
    is no value, and NaN is returned.

    Example:
        >>> relative_rms(np.array([3.0, 5.0]), np.array([3.0, 4.0]))
        0.2
        >>> relative_rms(np.zeros(2), np.zeros(2)), relative_rms(np.ones(2), np.zeros(2))
        (0.0, inf)
    """
    difference = abs_difference(actual, expected)
    reference = np.asarray(expected).astype(np.float64)
    reference = reference[np.isfinite(reference)]
    if reference.size == 0 and not difference.any():
        return float("nan")
    peak = np.max(np.abs(reference), initial=0.0)
    if peak == 0.0:
        return float("inf") if difference.any() else 0.0
    # Divided by the peak first, so that no square leaves float64's range.
    with np.errstate(over="ignore", under="ignore"):
        return float(np.sqrt(np.sum((difference / peak) ** 2) / np.sum((reference / peak) ** 2)))


def compare_out(
    actual: Array, expected: Array, lengths: Sequence[int], starts: Sequence[int] | None = None
) -> Comparison:
    """Compare outputs [T, H, D] of sequences that follow one another; a sequence of length 0 has no value.

    Where `starts` says at which token each sequence begins, tokens in none of them are padding, which has no part in
    relative rms.

    Example:
        >>> out, exact = np.array([1.0, 2.0, 5.0]).reshape(3, 1, 1), np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
        >>> found = compare_out(out, exact, [2, 0, 1])
        >>> found.relative_rms.ravel().tolist(), found.worst_at, found.max_abs_at
        ([0.0, nan, 0.25], (2, 0), (2, 0, 0))
    """
    _same_shape("compare_out", actual, expected)
    if starts is None:
        if sum(lengths) != len(actual):
            raise ContractError(f"compare_out: `lengths` must have the sum T = {len(actual)}, got {sum(lengths)}")
        starts = (np.cumsum(np.asarray(lengths, np.int64)) - lengths).tolist()
    pieces = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return _compare(actual, expected, pieces)


def compare_state(actual: Array, expected: Array) -> Comparison:
    """Compare states [N, H, ...], or a pool of them: every (sequence or slot, head) by itself.

    Example:
        >>> found = compare_state(np.full((1, 2, 2, 2), 1.5), np.full((1, 2, 2, 2), 1.0))
        >>> found.worst, found.worst_at, found.max_abs, found.actual, found.expected
        (0.5, (0, 0), 0.5, 1.5, 1.0)
    """
    _same_shape("compare_state", actual, expected)
    return _compare(actual, expected, [slice(n, n + 1) for n in range(len(actual))])


def bound_of(result: Array) -> float:
    """Return the largest relative rms that a replay may have in a result: the bound of its dtype.

    Example:
        >>> bound_of(np.zeros(3, np.float16))
        0.0004
    """
    return BOUNDS[result.dtype.name]


def _same_shape(function: str, actual: Array, expected: Array) -> None:
    """Raise where the arrays cannot be compared element by element."""
    if actual.shape != expected.shape:
        raise ContractError(
            f"{function}: `actual` must have the shape of `expected`, {list(expected.shape)}, got {list(actual.shape)}"
        )


def _compare(actual: Array, expected: Array, pieces: Sequence[slice]) -> Comparison:
    """Compare head by head the rows that every piece names."""
    n_heads = actual.shape[1]
    errors = [[relative_rms(actual[rows, h], expected[rows, h]) for h in range(n_heads)] for rows in pieces]
    difference = abs_difference(actual, expected)
    table = np.array(errors, np.float64).reshape(len(pieces), n_heads)
    if difference.size == 0:
        return Comparison(table, 0.0, None, None, None)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(difference)), difference.shape))
    return Comparison(table, float(difference[at]), at, float(actual[at]), float(expected[at]))
