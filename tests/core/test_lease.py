"""Memory of large results: used again when nobody looks at it any more, and not before."""

import gc

import numpy as np
import pytest

from cgdr_numba.core import lease, memory
from cgdr_numba.core.lease import LEASED_BYTES, MOST_SPARE_BYTES, Lease


@pytest.fixture(autouse=True)
def no_spare_block():
    """Begin and end without a block that other tests left."""
    lease._spare.clear()
    yield
    lease._spare.clear()


def large(n_bytes: int = LEASED_BYTES) -> np.ndarray:
    return memory.result((n_bytes // 4,), np.float32)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_results_are_used_again_once_they_are_gone() -> None:
    first = large()
    where = address(first)
    assert where % memory.ALIGNMENT_BYTES == 0
    assert first.flags.writeable
    del first
    assert address(large()) == where


def test_views_keep_a_result_alive() -> None:
    first = large()
    view = first[:10][::2]
    view[:] = 7
    del first
    gc.collect()
    others = [large(), large()]
    for other in others:
        other[:] = 0
        assert not np.shares_memory(other, view)
    assert np.array_equal(view, np.full(5, 7, np.float32))


def test_only_one_block_is_kept_and_no_larger_one() -> None:
    results = [large() for _ in range(3)]
    del results
    assert [block.nbytes for block in lease._spare] == [LEASED_BYTES + memory.ALIGNMENT_BYTES]
    del lease._spare[:]
    del (block := [Lease(MOST_SPARE_BYTES + 1)])[:]
    assert not block
    assert not lease._spare


def test_a_block_much_larger_than_what_is_asked_for_is_let_go() -> None:
    results = large(2 * LEASED_BYTES - 1024)
    where = address(results)
    del results
    again = large()
    assert address(again) == where, "half of the block is used"
    del again
    small = memory.result((LEASED_BYTES // 8,), np.float32)
    assert address(small) != where, "results below the threshold are the C library's"


def test_a_lease_that_could_not_be_made_gives_nothing_back() -> None:
    with pytest.raises((MemoryError, ValueError)):
        Lease(2**62)
    gc.collect()
    assert not lease._spare
