"""Parts of long calls: every token once and in order, cuts at multiples of 64, even shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgdr_numba.core.dims import Dims
from cgdr_numba.sched.parts import next_lengths, tokens_of


@given(
    lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=5),
)
def test_every_token_comes_once_and_cuts_are_at_multiples_of_64(lengths: list[int], sizes: list[int]) -> None:
    whole = np.array(lengths, np.int64)
    done = np.zeros_like(whole)
    for i in range(10**4):
        if np.array_equal(done, whole):
            break
        n_tokens = sizes[i % len(sizes)]
        part = next_lengths(whole - done, n_tokens)
        assert part.any()
        assert (part >= 0).all()
        done += part
        assert (done <= whole).all()
        assert ((done == whole) | (done % 64 == 0)).all()
        assert part.sum() <= n_tokens + 64 * max(1, n_tokens // 64)
    assert np.array_equal(done, whole)


def test_shares_are_even_and_many_sequences_come_in_turns() -> None:
    assert next_lengths(np.array([6400, 640, 0, 100]), 1000).tolist() == [832, 128, 0, 64]
    assert next_lengths(np.full(100, 64), 640).tolist() == [64] * 10 + [0] * 90
    assert next_lengths(np.array([0, 10, 500]), 1).tolist() == [0, 10, 0]


@pytest.mark.parametrize(("flops", "tokens"), [(0, 0), (6e6 * 7, 7), (6e6 * 7.9, 7)])
def test_tokens_of_work(flops: float, tokens: int) -> None:
    assert tokens_of(flops, Dims(1, 1, 1, 10, 100, 1000)) == tokens
