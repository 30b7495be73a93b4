"""Which path served the last call."""

import threading
import timeit
from typing import Any

import numba
import numpy as np
import pytest

from cgdr_numba import RecurrentStep, Served, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, last_call
from cgdr_numba.core import served
from cgdr_numba.errors import ContractError

COMPILED = not numba.config.DISABLE_JIT
TWO = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2 or not COMPILED, reason="needs two threads")


def heads(n_tokens: int, n: int = 1) -> Any:
    """q, k and v of n heads."""
    return [np.ones((1, n_tokens, n, 4), np.float32)] * 3


def test_every_backend_says_who_served() -> None:
    chunk_gated_delta_rule(*heads(20), threads=1)
    assert last_call() == Served("fast", "chunks", 1, 1, "one bin")
    chunk_gated_delta_rule(*heads(2), threads=1)
    assert last_call() == Served("fast", "steps", 1, 1, "one bin")
    fused_recurrent_gated_delta_rule(*heads(2), threads=1)
    assert last_call() == Served("fast", "steps", 1, 1, "one bin")
    chunk_gated_delta_rule(*heads(2), backend="faithful", threads=1)
    assert last_call() == Served("faithful", "chunks", 1, 1, "one bin")
    chunk_gated_delta_rule(*heads(2), backend="golden")
    assert last_call() == Served("golden", "tokens", 1, 1, "plain Python")
    (q, _, _), gate = heads(1), np.zeros((1, 1, 1), np.float32)
    state = np.zeros((1, 1, 4, 4), np.float32)
    step = RecurrentStep(q, q, q, gate, gate, state, threads=1)
    assert last_call() == Served("golden", "tokens", 1, 1, "plain Python"), "preparing runs nothing"
    step(q, q, q, gate, gate, state)
    assert last_call() == Served("fast", "steps", 1, 1, "one bin")


def test_what_raises_leaves_no_note() -> None:
    chunk_gated_delta_rule(*heads(2), backend="golden")
    with pytest.raises(ContractError):
        chunk_gated_delta_rule(*heads(2), threads=0)
    assert last_call() == Served("golden", "tokens", 1, 1, "plain Python")


def test_python_threads_have_notes_of_their_own() -> None:
    seen: list[Served | None] = []

    def work() -> None:
        seen.append(last_call())
        chunk_gated_delta_rule(*heads(2), backend="golden")
        seen.append(last_call())

    chunk_gated_delta_rule(*heads(20), threads=1)
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [None, Served("golden", "tokens", 1, 1, "plain Python")]
    assert last_call() == Served("fast", "chunks", 1, 1, "one bin")


@pytest.mark.slow
@TWO
def test_several_bins_and_their_threads() -> None:
    chunk_gated_delta_rule(*heads(64, 4), threads=2)
    assert last_call() == Served("fast", "chunks", 2, 2, "")
    chunk_gated_delta_rule(*heads(64, 4), backend="faithful", threads=1)
    assert last_call() == Served("faithful", "chunks", 4, 1, "one thread wanted")


@pytest.mark.skipif(COMPILED, reason="is about kernels as plain Python")
def test_plain_kernels_run_on_one_thread() -> None:
    chunk_gated_delta_rule(*heads(4, 4), backend="faithful")
    assert last_call() == Served("faithful", "chunks", 4, 1, "no JIT")


def test_a_note_is_small() -> None:
    """No time is asserted: the figure is printed where a test is run with -s."""
    seconds = timeit.timeit(lambda: served.note(("fast", "steps"), 1, 1, "one bin"), number=10000) / 10000
    print(f"a note takes {1e6 * seconds:.2f} us")
    assert last_call() == Served("fast", "steps", 1, 1, "one bin")
