"""Blocks of the fast backend: transposes, the largest element, and elements loaded from any layout."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.core.dtypes import KINDS, as_words
from cgdr_numba.core.fast import blocks, microkernel

F32 = np.float32
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
CANARY = F32(-7.25)
SIZES = [(1, 1), (1, 16), (2, 3), (5, 37), (15, 17), (16, 16), (16, 128), (17, 15), (33, 1), (40, 70)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def whole(n: int) -> int:
    """The next multiple of 16, which scratch has room for."""
    return -(-n // 16) * 16


def in_room(x: np.ndarray) -> np.ndarray:
    """The same numbers in scratch whose room for whole vectors is NaN."""
    page = np.full((whole(x.shape[0]), whole(x.shape[1])), np.nan, F32)
    page[: x.shape[0], : x.shape[1]] = x
    return page[: x.shape[0], : x.shape[1]]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_transpose(m: int, n: int) -> None:
    x = random(m, n)
    page = np.full((whole(n) + 2, whole(m) + 16), CANARY, F32)
    blocks.transpose(in_room(x), page)
    assert np.array_equal(page[:n, :m], x.T)
    assert (page[whole(n) :] == CANARY).all(), "rows behind the last whole block"
    assert (page[:, whole(m) :] == CANARY).all(), "columns behind the last whole block"


def test_transpose_moves_bits_as_they_are() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, (21, 35), dtype=np.uint32)
    page = np.zeros((48, 32), F32)
    blocks.transpose(in_room(bits.view(F32)), page)
    numbers = ~np.isnan(bits.view(F32).T)
    assert np.array_equal(page.view(np.uint32)[:35, :21][numbers], bits.T[numbers])
    assert np.isnan(page[:35, :21][~numbers]).all()


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_largest(m: int, n: int) -> None:
    x = in_room(random(m, n))
    assert blocks.largest(x) == np.abs(x).max()
    for value in (-1e30, np.inf, -np.inf, np.nan):
        for i, j in {(0, 0), (m - 1, n - 1), (m // 2, n // 2)}:
            some = in_room(x)
            some[i, j] = value
            np.testing.assert_equal(blocks.largest(some), F32(abs(value)))


def first_axis_adjacent(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(x)


def first_axis_adjacent_in_a_page(x: np.ndarray) -> np.ndarray:
    page = np.zeros((x.shape[1], x.shape[0] + 9), x.dtype)
    page[:, 4 : 4 + x.shape[0]] = x.T
    return page[:, 4 : 4 + x.shape[0]].T


def rows_in_a_page(x: np.ndarray) -> np.ndarray:
    page = np.zeros((x.shape[0], x.shape[1] + 9), x.dtype)
    page[:, 4 : 4 + x.shape[1]] = x
    return page[:, 4 : 4 + x.shape[1]]


def spaced(x: np.ndarray) -> np.ndarray:
    page = np.zeros((3 * x.shape[0], 2 * x.shape[1]), x.dtype)
    page[::3, ::2] = x
    return page[::3, ::2]


def backwards(x: np.ndarray) -> np.ndarray:
    return x[::-1, ::-1].copy()[::-1, ::-1]


def upside_down(x: np.ndarray) -> np.ndarray:
    return x[::-1].copy()[::-1]


def columns_backwards(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(x[:, ::-1])[:, ::-1]


def odd_address(x: np.ndarray) -> np.ndarray:
    page = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape[::-1])
    page[...] = x.T
    return page.T


LAYOUTS: list[Callable[[np.ndarray], np.ndarray]] = [
    np.ascontiguousarray, first_axis_adjacent, first_axis_adjacent_in_a_page, rows_in_a_page, spaced, backwards,
    upside_down, columns_backwards, odd_address,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_load_block(layout: Callable[[np.ndarray], np.ndarray], dtype: Any) -> None:
    for m, n in [(1, 1), (1, 7), (2, 1), (5, 37), (7, 5), (15, 128), (16, 16), (16, 33)]:
        x = random(m, n).astype(dtype)
        page = np.full((whole(m) + 1, whole(n) + 16), CANARY, F32)
        turn = np.full(whole(m) * whole(n), np.nan, F32)
        blocks.load_block(as_words(layout(x)), KINDS[np.dtype(dtype)], page, turn)
        assert np.array_equal(page[:m, :n], x.astype(F32)), (m, n)
        assert (page[whole(m) :] == CANARY).all(), (m, n)
        assert (page[:, whole(n) :] == CANARY).all(), (m, n)


@pytest.mark.parametrize("axis", [0, 1])
def test_load_block_of_one_row_again_and_again(axis: int) -> None:
    x = np.broadcast_to(random(5, 9).take([0], axis), (5, 9))
    assert 0 in x.strides
    page, turn = np.full((16, 16), np.nan, F32), np.full(256, np.nan, F32)
    blocks.load_block(as_words(x), KINDS[x.dtype], page, turn)
    assert np.array_equal(page[:5, :9], x)


def test_whole_vectors_fit_the_room() -> None:
    assert 16 % microkernel.lanes() == 0
