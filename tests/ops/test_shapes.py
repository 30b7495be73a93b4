"""Lengths, tails and widths, batches, head mapping and packed sequences."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cgdr_numba.core import memory
from judge import assert_same_bits, assert_within, both_families, run_cann, run_fla, same_bits
from reference import Case, Result, make_case, part, rr_state, token_loop

slow = pytest.mark.slow


@both_families
@pytest.mark.parametrize(
    "t",
    [1, 2, 15, 16, 17, 31, 32, 33, *(pytest.param(t, marks=slow) for t in (63, 64, 65, 127, 128, 129, 191))],
)
def test_t035_every_kind_of_length(backend: str, run: Any, t: int) -> None:
    case = make_case(35, t=t, heads=(1, 2), dims=(32, 48))
    assert_within(case, run(case, backend), out=1e-5, state=1e-5)


@pytest.mark.parametrize("t", [63, 64, 65, 128, 129])
def test_t035_lengths_about_a_chunk_in_few_dimensions(backend: str, t: int) -> None:
    case = make_case(35, t=t, heads=(1, 2), dims=(4, 3))
    assert_within(case, run_fla(case, backend), out=1e-5, state=1e-5)


@both_families
def test_t037_state_behind_a_tail(backend: str, run: Any) -> None:
    case = make_case(37, t=71, dims=(16, 24))
    whole = token_loop(case)
    prefill = part(case, 0, 70, case.state)
    state = run(prefill, backend).state
    assert rr_state(state, token_loop(prefill).state).rr <= 1e-6
    decode = part(case, 70, 71, state)
    expected = Result(whole.out[:, 70:], whole.state)
    assert_within(decode, run(decode, backend), out=1e-6, state=1e-6, expected=expected)


def among_nan(array: np.ndarray) -> np.ndarray:
    """The same numbers as a view into a larger array that is NaN everywhere else."""
    page = np.full([n + 4 for n in array.shape], np.nan, array.dtype)
    inside = page[tuple(slice(2, -2) for _ in array.shape)]
    inside[...] = array
    return inside


@pytest.fixture
def fenced_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fences of 256 bytes before and behind every array that the package allocates; they must stay as they are."""
    allocate = memory.empty
    fence, fences = 256, []

    def fenced(shape: tuple[int, ...], dtype: Any) -> Any:
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        page = allocate((-(-n_bytes // 4) + 2 * fence // 4,), np.float32).view(np.uint8)
        inside = page[fence : fence + n_bytes].view(dtype).reshape(shape)
        inside[...] = np.nan
        for outside in (page[:fence], page[fence + n_bytes :]):
            outside[...] = 0xA5
            fences.append(outside)
        return inside

    monkeypatch.setattr(memory, "empty", fenced)
    yield
    assert fences
    assert all((outside == 0xA5).all() for outside in fences), "written outside of an array"


WIDTHS = [
    (1, 1), (3, 5), (9, 9), (16, 8), *(
        pytest.param(pair, marks=slow)
        for pair in ((40, 96), (80, 96), (96, 192), (128, 64), (64, 128), (192, 128), (256, 512))
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dims", WIDTHS, ids=str)
def test_t038_widths_of_every_kind(backend: str, dims: tuple[int, int], dtype: type, fenced_memory: None) -> None:
    case = make_case(38, t=67, dims=dims, dtype=dtype)
    tensors = {name: among_nan(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "state")}
    # float16 runs through the kernel's staging copies; its output is judged at that precision.
    bound = 1e-5 if dtype == np.float32 else 4e-4
    assert_within(case, run_fla(case.but(**tensors), backend), out=bound, state=1e-5)


def rows(case: Case, n: int) -> Case:
    """Batch row n alone."""
    tensors = {name: getattr(case, name)[n : n + 1] for name in ("q", "k", "v", "g", "beta", "state")}
    return case.but(**tensors)


@both_families
@pytest.mark.parametrize("t", [9, pytest.param(130, marks=slow)])
def test_t041_batch_rows_are_sequences_of_their_own(backend: str, run: Any, t: int) -> None:
    case = make_case(41, t=t, batch=3, heads=(1, 2))
    together = run(case, backend)
    alone = [run(rows(case, n), backend) for n in range(3)]
    assert_same_bits(together, Result(*(np.concatenate(x) for x in zip(*alone, strict=True))))
    assert_within(case, together, out=1e-5, state=1e-5)


@pytest.mark.parametrize(
    ("t", "few", "many"), [(66, 2, 5), pytest.param(512, 8, 32, marks=slow)], ids=["small", "full"]
)
def test_t043_heads_do_not_know_how_many_they_are(backend: str, t: int, few: int, many: int) -> None:
    case = make_case(43, t=t, heads=(many, many))
    first = {name: getattr(case, name)[:, :, :few] for name in ("q", "k", "v", "g", "beta")}
    some = run_fla(case.but(**first, state=case.state[:, :few]), backend)
    out, state = run_fla(case, backend)
    assert_same_bits(some, Result(out[:, :, :few], state[:, :few]))


@both_families
def test_t044_value_heads_share_key_heads_as_neighbours(backend: str, run: Any) -> None:
    k = np.array([[1, 0], [0, 1]], np.float32).reshape(1, 1, 2, 2)
    v = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 4, 1)
    zeros, ones = np.zeros((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32)
    state = run(Case(k, k, v, zeros, ones, scale=1.0), backend).state
    assert state[0, :, :, 0].tolist() == [[1, 0], [2, 0], [0, 3], [0, 4]]


@both_families
@pytest.mark.parametrize(
    "cu", [(0, 128, 128, 256), (0, 0, 5), (0, 5, 5), (0, 0, 0, 3, 3)], ids=["middle", "first", "last", "several"]
)
def test_t052_empty_sequences_pass_their_states_through(backend: str, run: Any, cu: tuple[int, ...]) -> None:
    n_sequences = len(cu) - 1
    case = make_case(52, t=cu[-1], cu=cu)
    numbers = np.arange(1, n_sequences + 1, dtype=np.float32).reshape(-1, 1, 1, 1)
    case = case.but(state=np.broadcast_to(numbers, case.state.shape).copy())
    out, state = run(case, backend)
    for n, (begin, end) in enumerate(pairwise(cu)):
        if begin == end:
            assert same_bits(state[n], case.state[n])
        else:
            alone = run(part(case, begin, end, case.state[n : n + 1]).but(cu=None), backend)
            assert_same_bits(Result(out[:, begin:end], state[n : n + 1]), alone)


@pytest.mark.parametrize("given", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("cu", [(0, 0, 0), (0,)], ids=["two", "none"])
def test_t053_no_tokens_at_all(backend: str, cu: tuple[int, ...], given: bool) -> None:
    run_fla(make_case(53, t=70, heads=(2, 4)), backend)
    case = make_case(53, t=0, heads=(2, 4), dims=(3, 5), cu=cu, state=given)
    out, state = run_fla(case, backend)
    assert out.shape == (1, 0, 4, 5)
    assert state.shape == (len(cu) - 1, 4, 3, 5)
    assert same_bits(state, case.initial_state())
    assert_same_bits(run_cann(case, backend), Result(out, state))


def test_t053_batch_rows_without_tokens(backend: str) -> None:
    case = make_case(53, t=0, batch=2)
    out, state = run_fla(case, backend)
    assert out.shape == (2, 0, 1, 16)
    assert same_bits(state, case.state)


@both_families
def test_t056_sequences_of_one_token_are_decode_steps(backend: str, run: Any) -> None:
    case = make_case(56, t=64, heads=(1, 2), cu=np.arange(65))
    together = run(case, backend)
    assert_within(case, together, out=1e-6, state=1e-6)
    steps = [run(part(case, t, t + 1, case.state[t : t + 1]).but(cu=None), backend) for t in range(64)]
    out, state = zip(*steps, strict=True)
    assert_same_bits(together, Result(np.concatenate(out, axis=1), np.concatenate(state)))


RAGGED = (2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1)


@both_families
@pytest.mark.parametrize(
    ("lengths", "width"), [(RAGGED[5:], 8), pytest.param(RAGGED, 32, marks=slow)], ids=["short", "full"]
)
def test_t058_ragged_lengths(backend: str, run: Any, lengths: tuple[int, ...], width: int) -> None:
    cu = np.cumsum((0, *lengths))
    case = make_case(58, t=int(cu[-1]), heads=(1, 2), dims=(width, width), cu=cu)
    assert_within(case, run(case, backend), out=1e-5, state=1e-5)


def test_t059_sequences_without_states_begin_at_zero(backend: str) -> None:
    cu = (0, 3, 10, 11, 30, 40)
    case = make_case(59, t=40, heads=(2, 4), dims=(8, 12), cu=cu, state=False)
    out, state = run_fla(case, backend)
    assert state.shape == (5, 4, 8, 12)
    assert_within(case, Result(out, state), out=1e-5, state=1e-5)
    for n, (begin, end) in enumerate(pairwise(cu)):
        alone = run_fla(part(case, begin, end, None).but(cu=None), backend)
        assert_same_bits(Result(out[:, begin:end], state[n : n + 1]), alone)
