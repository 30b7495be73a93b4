"""Slots of a pool, on every backend: padding, ranges, races, larger pages, dtypes, separate slots to read and write."""

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import DtypeError
from pool_cases import (
    DTYPES,
    assert_right,
    every_backend,
    make_pool_case,
    pool_loop,
    run,
    same,
    written,
)
from reference import Array


@every_backend
def test_t080_slot_minus_1_is_padding(backend: str) -> None:
    case = make_pool_case(80, (1, 1, 1), n_slots=4)
    state = np.broadcast_to(np.arange(11.0, 15)[:, None, None, None], case.state.shape).astype(np.float32)
    case = case.but(state=state, slots=[2, -1, 0])
    result = run(case, backend)
    assert not result.out[1].any()
    assert result.out[[0, 2]].all()
    assert_right(case.but(slots=np.array([2, -1, 0])), result, 1e-5)
    # numpy and numba take -1 for the last slot.
    np.testing.assert_array_equal(result.pool[[1, 3]], state[[1, 3]])


@every_backend
def test_t080_rows_behind_the_sums_are_padding_whatever_they_hold(backend: str) -> None:
    """A graph of fixed size: its tail holds what an earlier call left there."""
    case = make_pool_case(81, (2, 1), dtype=np.float16, state=np.float32)
    expected = run(case, backend)
    names = ("query", "key", "value", "beta", "g")
    tail = {
        name: np.concatenate([getattr(case, name), np.full((3, *getattr(case, name).shape[1:]), np.nan, np.float16)])
        for name in names
    }
    tail = {name: x.astype(getattr(case, name).dtype) for name, x in tail.items()}
    for lengths in ((2, 1), (2, 1, 0), (2, 1, 3), (2, 1, 1, 1, 1)):
        padded = case.but(**tail, slots=[*case.slots, -1, -1, -1], lengths=lengths)
        result = run(padded, backend)
        assert not result.out[3:].any()
        same(result._replace(out=result.out[:3]), expected)


@every_backend
@pytest.mark.parametrize("slot", [4, 10**6, -2, -(2**63), 2**63 - 1])
def test_t082_slots_outside_of_the_pool_are_refused(backend: str, slot: int) -> None:
    case = make_pool_case(82, (1, 1), n_slots=4)
    before = case.state.copy()
    for changes in ({"slots": [0, slot]}, {"slots": [0, 1], "read": [2, slot]}):
        with pytest.raises(ValueError, match=rf"must be slots from 0 to 3, or -1 for padding, got {slot} at"):
            run(case.but(**changes), backend, pool=case.state)
    np.testing.assert_array_equal(case.state, before)


@every_backend
def test_t083_one_slot_in_two_sequences_is_refused(backend: str) -> None:
    case = make_pool_case(83, (1, 1), n_slots=4)
    before = case.state.copy()
    with pytest.raises(ValueError, match="a slot in one sequence only, got slot 1 in sequences 0 and 1"):
        run(case.but(slots=[1, 1]), backend, pool=case.state)
    np.testing.assert_array_equal(case.state, before)


@every_backend
def test_t083_one_slot_for_a_whole_sequence_holds_its_last_state(backend: str) -> None:
    case = make_pool_case(84, (4, 3))
    case = case.but(slots=np.array([2, 2, 2, 2, 0, 0, 0]))
    assert_right(case, run(case, backend), 1e-5)


def pages(pool: Array) -> dict[str, Array]:
    """The pool as a part of larger pages, by the axis that has room behind it; gap bytes are 0xA5."""
    n, hv, dv, dk = pool.shape
    found = {}
    for name, shape in {
        "slots": (n, 2 * hv * dv * dk, 1, 1),
        "heads": (n, hv + 3, dv, dk),
        "rows": (n, hv, dv + 1, dk),
        "columns": (n, hv, dv, dk + 5),
    }.items():
        page = np.full(int(np.prod(shape)) * pool.itemsize, 0xA5, np.uint8).view(pool.dtype).reshape(shape)
        if name == "slots":
            view = np.lib.stride_tricks.as_strided(page, pool.shape, (page.strides[0], *pool.strides[1:]))
        else:
            view = page[:, :hv, :dv, :dk]
        view[...] = pool
        found[name] = view
    return found


def gaps(view: Array) -> bytes:
    """The bytes of a view's page that are not the view's."""
    base: Any = view
    while base.base is not None:
        base = base.base
    page = base.view(np.uint8).reshape(-1)
    start = view.__array_interface__["data"][0] - page.__array_interface__["data"][0]
    steps = [np.arange(n) * step for n, step in zip(view.shape, view.strides, strict=True)]
    at = start + sum(np.meshgrid(*steps, np.arange(view.itemsize), indexing="ij"))
    is_gap = np.ones(page.size, bool)
    is_gap[at.ravel()] = False
    assert is_gap.any()
    return page[is_gap].tobytes()


@every_backend
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("room", ["slots", "heads", "rows", "columns"])
def test_t085_pools_in_larger_pages(backend: str, room: str, state: Any) -> None:
    case = make_pool_case(85, (2, 1), dims=(16, 9), state=state)
    expected = run(case, backend)
    view = pages(case.state)[room]
    result = run(case, backend, pool=view)
    assert result.pool is view
    same(result, expected)
    assert set(gaps(view)) == {0xA5}


@every_backend
def test_t085_turned_pools_are_refused_and_not_copied(backend: str) -> None:
    case = make_pool_case(86, (2, 1))
    turned = np.ascontiguousarray(case.state.swapaxes(2, 3)).swapaxes(2, 3)
    before = turned.copy()
    with pytest.raises(ValueError, match="`state` must have adjacent elements on its last axis, got a stride of 64"):
        run(case, backend, pool=turned)
    np.testing.assert_array_equal(turned, before)


@every_backend
@pytest.mark.parametrize("state", DTYPES)
def test_t086_pools_are_read_as_their_dtype_says(backend: str, state: Any) -> None:
    """1.0 everywhere: read as pairs of bfloat16 a float32 would be 1 and 0 in turn."""
    case = make_pool_case(87, (1,), gates="", state=state)
    ones = np.ones_like(case.state)
    case = case.but(state=ones, beta=np.zeros_like(case.beta))
    result = run(case, backend)
    np.testing.assert_array_equal(result.pool, ones)
    sums = case.scale * case.query.astype(np.float64).sum(-1)
    np.testing.assert_allclose(result.out[0], np.broadcast_to(sums.T, result.out[0].shape), rtol=1e-5)


@every_backend
def test_t086_pools_of_other_dtypes_are_refused(backend: str) -> None:
    case = make_pool_case(88, (1,))
    for dtype in (np.int16, np.complex64):
        with pytest.raises(TypeError, match=r"`state` must be float16, bfloat16, float32 or float64, got"):
            run(case, backend, pool=case.state.astype(dtype))
    if backend != "golden":
        with pytest.raises(DtypeError, match=r"a float64 `state` is golden's only, .* state.astype\(np.float32\)"):
            run(case, backend, pool=case.state.astype(np.float64))
        with pytest.raises(DtypeError, match=r"a float64 `query` is golden's only"):
            run(case.cast(np.float64, np.float32), backend)


@every_backend
@pytest.mark.parametrize("state", [np.float16, ml_dtypes.bfloat16])
def test_t019_pools_of_2_byte_floats_move_on_in_place(backend: str, state: Any) -> None:
    """One step is the rounded step of the float64 loop within a unit in the last place, and not what was there."""
    case = make_pool_case(19, (1, 1), state=state)
    result = run(case, backend)
    truth = pool_loop(case).pool
    slots = written(case)
    steps = [np.abs(a[slots].view(np.int16).astype(int)) for a in (result.pool, truth.astype(state))]
    assert np.abs(steps[0] - steps[1]).max() <= 1
    assert (result.pool[slots] != case.state[slots]).mean() > 0.9


@every_backend
def test_t088_separate_slots_to_read_and_to_write(backend: str) -> None:
    case = make_pool_case(89, (1,), n_slots=8).but(slots=np.array([5]), read=[3])
    result = run(case, backend)
    np.testing.assert_array_equal(result.pool[3], case.state[3])
    assert_right(case, result, 1e-5)
    assert_right(case.but(read=[5]), run(case.but(read=[5]), backend), 1e-5)
    shared = make_pool_case(90, (2, 3), n_slots=8).but(slots=np.arange(5), read=[7, 7])
    assert_right(shared, run(shared, backend), 1e-5)
    chain = make_pool_case(91, (1, 1), n_slots=8).but(slots=[4, 6], read=[3, 4])
    with pytest.raises(ValueError, match="not be slots that another sequence writes, got slot 4 for sequence 1"):
        run(chain, backend)


@every_backend
@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8"])
def test_t118_indices_of_any_integer_type(backend: str, dtype: str) -> None:
    case = make_pool_case(118, (2, 3), accepted=True)
    expected = run(case, backend)
    arrays = {name: np.array(getattr(case, name)).astype(dtype) for name in ("lengths", "slots", "accepted")}
    same(run(case.but(**arrays), backend), expected)


@every_backend
def test_a_large_pool_costs_what_is_touched_of_it(backend: str) -> None:
    """2 of 4096 slots: no copy of the pool, no list of its slots."""
    case = make_pool_case(92, (1, 1), n_slots=2)
    small = run(case, backend)
    pool = np.zeros((4096, *case.state.shape[1:]), np.float32)
    slots = np.array([4000, 7])
    pool[slots] = case.state[case.slots]
    tracemalloc.start()
    try:
        result = run(case.but(slots=slots), backend, pool=pool)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < pool.nbytes / 16
    same(result._replace(pool=pool[slots]), small._replace(pool=small.pool[case.slots]))
    assert sorted(np.flatnonzero(pool.any(axis=(1, 2, 3)))) == [7, 4000]
