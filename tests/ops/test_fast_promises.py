"""The bits of fast's chunked form depend on a head's own rows, state, Dk and Dv: each thing that must not matter."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest

from cgdr_numba.core import memory
from cgdr_numba.core.dims import Dims
from cgdr_numba.sched.host_plan import plan_host
from conftest import COMPILED
from fast_cases import (
    DTYPES,
    LENGTHS,
    WIDTHS,
    devices,
    difference,
    fast_case,
    of_heads,
    of_sequences,
    result_of_sequences,
    run_fast,
)
from reference import Case, Result, part

MOST_THREADS = int(numba.config.NUMBA_NUM_THREADS)
slow = pytest.mark.slow
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
every_layout = pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
every_width = pytest.mark.parametrize(
    "dims", [pytest.param(dims, marks=() if max(dims) < 8 else slow) for dims in WIDTHS], ids=str
)
every_group = pytest.mark.parametrize("group", [1, pytest.param(2, marks=slow), 3])


def same(actual: Result, expected: Result, what: Any = "") -> None:
    found = difference(actual, expected)
    assert not found, f"{what}: {found}"


def ragged(dims: tuple[int, int], dtype: Any, group: int, v_first: bool, **options: Any) -> Case:
    """Sequences of every kind in one call."""
    lengths = LENGTHS if COMPILED else (0, 18, 3)
    return fast_case(70, lengths, heads=(2, 2 * group), dims=dims, dtype=dtype, v_first=v_first, **options)


@every_layout
@every_dtype
@every_group
@every_width
def test_t070_threads_and_plans(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    case = ragged(dims, dtype, group, v_first)
    expected = run_fast(case, v_first, threads=1)
    for threads in {None, 1, 2, MOST_THREADS}:
        if threads is None or threads <= MOST_THREADS:
            same(run_fast(case, v_first, threads=threads), expected, f"threads={threads}")
    for kind, device in devices(case).items():
        same(run_fast(case, v_first, target=device), expected, f"(bins, width) = {kind}")


@every_layout
def test_a_plan_made_before(v_first: bool) -> None:
    case = ragged((5, 7), np.float32, 3, v_first)
    lengths = tuple(case.lengths)
    dims = Dims(sum(lengths), len(lengths), case.q.shape[2], case.v.shape[2], case.q.shape[3], case.v.shape[3])
    plan = plan_host(dims, lengths, 3, 1)
    same(run_fast(case, v_first, plan=plan), run_fast(case, v_first))


def test_plans_are_of_every_kind() -> None:
    """That the devices above give one bin and several, and tiles of 16 columns up to the whole width."""
    kinds = devices(fast_case(70, LENGTHS, heads=(2, 2), dims=(128, 128)))
    assert {width for _, width in kinds} == {16, 32, 64, 128}
    assert {1, 2, 3} < {bins for bins, _ in kinds}


@slow
@every_layout
@pytest.mark.parametrize("dims", [(128, 128), (37, 53), (16, 130)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 3e38], ids=str)
@pytest.mark.parametrize("name", ["v", "state", "k", "q", "g", "beta"])
def test_plans_do_not_matter_where_float32_ends(name: str, value: float, dims: tuple[int, int], v_first: bool) -> None:
    """The token loop runs for a chunk or does not, whichever tile of it leaves float32."""
    case = ragged(dims, np.float32, 2, v_first)
    spoiled = getattr(case, name).copy()
    assert case.lengths[1] == 83
    place = (1, 2, 3, 4) if name == "state" else (0, 50, 2, 4)
    spoiled[tuple(i % n for i, n in zip(place, spoiled.shape, strict=False))] = value
    case = case.but(**{name: spoiled})
    with np.errstate(all="ignore"):
        expected = run_fast(case, v_first, threads=1)
        for kind, device in devices(case).items():
            same(run_fast(case, v_first, target=device), expected, f"(bins, width) = {kind}")


@every_layout
@every_dtype
@every_group
@every_width
def test_t041_mates_and_packing(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    case = ragged(dims, dtype, group, v_first)
    together = run_fast(case, v_first)
    n = len(case.lengths)
    orders = [[i] for i in range(n)] + [list(range(n))[::-1], [*range(0, n, 2)], [*range(1, n, 2), 0, 0]]
    for order in orders:
        alone = run_fast(of_sequences(case, order), v_first)
        same(alone, result_of_sequences(case, together, order), f"sequences {order}")


@every_layout
@every_dtype
@pytest.mark.parametrize("dims", [(5, 7), pytest.param((37, 53), marks=slow)], ids=str)
def test_t041_batch_rows_and_packed_sequences(dims: tuple[int, int], dtype: Any, v_first: bool) -> None:
    t = 70 if COMPILED else 19
    case = fast_case(41, t, heads=(1, 2), dims=dims, dtype=dtype, v_first=v_first, batch=3)
    batched = run_fast(case, v_first)
    packed = {name: getattr(case, name).reshape(1, 3 * t, *getattr(case, name).shape[2:]) for name in
              ("q", "k", "v", "g", "beta")}  # fmt: skip
    out, state = run_fast(case.but(**packed, cu=[0, t, 2 * t, 3 * t]), v_first)
    same(Result(out.reshape(batched.out.shape), state), batched)


@every_layout
@every_dtype
@every_group
@every_width
def test_t043_heads_among_more_heads(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    lengths = (83, 5) if COMPILED else (17, 5)
    case = fast_case(43, lengths, heads=(3, 3 * group), dims=dims, dtype=dtype, v_first=v_first)
    out, state = run_fast(case, v_first)
    for first, end in ((0, 1), (1, 2), (1, 3)):
        own = slice(first * group, end * group)
        some = run_fast(of_heads(case, first, end), v_first)
        same(some, Result(out[:, :, own], state[:, own]), f"key heads {first} to {end}")
    if group > 1:
        single = {name: np.repeat(getattr(case, name), group, axis=2) for name in ("q", "k")}
        same(run_fast(case.but(**single), v_first), Result(out, state), "key heads of their own")


def cuts(t: int) -> list[list[int]]:
    """Ways to split T tokens at multiples of 64."""
    places = list(range(64, t, 64))
    return [places, places[:1], places[-1:]]


@every_layout
@every_dtype
@every_group
@every_width
def test_splits_at_multiples_of_64(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    tails = (1, 2, 4, 5, 13, 16, 17, 20) if COMPILED else (2, 5)
    for t in [64 + tail for tail in tails] + ([128, 200] if COMPILED else []):
        case = fast_case(64, t, heads=(1, group), dims=dims, dtype=dtype, v_first=v_first)
        whole = run_fast(case, v_first)
        for places in cuts(t):
            outs, state = [], case.state
            for begin, end in zip([0, *places], [*places, t], strict=True):
                piece = run_fast(part(case, begin, end, state), v_first)
                outs.append(piece.out)
                state = piece.state
            same(Result(np.concatenate(outs, axis=1), state), whole, f"{t} tokens at {places}")


@slow
@every_layout
@pytest.mark.parametrize("tail", range(1, 21))
def test_splits_before_every_tail(tail: int, v_first: bool) -> None:
    """Also where the state comes with the tail: half a state of a larger array, at an odd address."""
    case = fast_case(65, 64 + tail, heads=(1, 2), dims=(37, 53), v_first=v_first)
    whole, first = run_fast(case, v_first), run_fast(part(case, 0, 64, case.state), v_first)
    odd = np.frombuffer(b"?" + first.state.tobytes(), np.uint8)[1:].view(np.float32).reshape(first.state.shape)
    page = np.zeros((3, 4, *first.state.shape[2:]), np.float32)
    page[1:2, 1:3] = first.state
    turned = np.ascontiguousarray(first.state.swapaxes(2, 3)).swapaxes(2, 3)
    for state in (first.state, odd, page[1:2, 1:3], turned, first.state.astype(np.float64)):
        second = run_fast(part(case, 64, 64 + tail, state), v_first)
        same(Result(np.concatenate([first.out, second.out], axis=1), second.state), whole)


@slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gates_and_states_of_other_dtypes_have_the_bits_of_their_float32(dtype: Any) -> None:
    case = ragged((37, 53), np.float32, 2, False)
    halves = case.but(**{name: getattr(case, name).astype(dtype) for name in ("g", "beta", "state")})
    wide = halves.but(**{name: getattr(halves, name).astype(np.float32) for name in ("g", "beta", "state")})
    same(run_fast(halves), run_fast(wide))


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every array that the package allocates is full of other garbage than the one before."""
    fills = iter(np.tile([np.nan, 1e30, -np.inf, 0.0, 7.0, -1e-38, 3e38], 100_000))
    for name in ("empty", "result"):
        allocate = getattr(memory, name)

        def filled(shape: tuple[int, ...], dtype: Any, allocate: Any = allocate) -> Any:
            array = allocate(shape, dtype)
            with np.errstate(over="ignore"):
                array[...] = next(fills)
            return array

        monkeypatch.setattr(memory, name, filled)
    yield
    assert next(fills) is not None


@every_layout
@every_dtype
@every_group
@every_width
def test_t070_repeats_among_other_calls(
    dims: tuple[int, int], group: int, dtype: Any, v_first: bool, garbage: None
) -> None:
    case = ragged(dims, dtype, group, v_first)
    first = run_fast(case, v_first)
    for i in range(20 if COMPILED else 2):
        other = fast_case(i, 1 + 7 * i, heads=(1, 1 + i % 3), dims=(3 + 5 * i, 90 - 4 * i), dtype=DTYPES[i % 3])
        run_fast(other if COMPILED else fast_case(i, 6, dims=(3, 4)))
        same(run_fast(case, v_first), first, f"repeat {i}")


@every_layout
@every_dtype
@every_group
@every_width
def test_t071_results_are_the_callers(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    """A final state given back is not written, and no result shares memory with anything."""
    case = fast_case(71, 67 if COMPILED else 6, heads=(1, group), dims=dims, dtype=dtype, v_first=v_first)
    first = run_fast(case, v_first)
    kept = Result(first.out.copy(), first.state.copy())
    second = run_fast(case.but(state=first.state), v_first)
    same(first, kept, "results of the first call")
    arrays = [first.out, first.state, second.out, second.state]
    inputs = [getattr(case, name) for name in ("q", "k", "v", "g", "beta", "state")]
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in [*arrays[:i], *inputs])
    assert difference(second, first)


@slow
@every_layout
def test_t116_work_of_unequal_pieces_has_no_races(v_first: bool) -> None:
    lengths = (1, 17, 64, 0, 65, 3, 130, 2, 31, 8, 70, 5, 40)
    case = fast_case(116, lengths, heads=(7, 14), dims=(32, 40), v_first=v_first)
    alone = run_fast(case, v_first, threads=1)
    for _ in range(50):
        same(run_fast(case, v_first, threads=MOST_THREADS), alone)
