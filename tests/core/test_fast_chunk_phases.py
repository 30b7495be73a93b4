"""Phases of the fast backend's chunks, one at a time against NumPy float64, and the scratch that they work in."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.dtypes import FP32, KINDS, as_words
from cgdr_numba.core.fast import chunk_arena, phases_k, phases_v, step
from cgdr_numba.core.fast.chunk_arena import HeadRows
from cgdr_numba.core.fast.decay import Gates, decay_scores, load_gates

F32, F64 = np.float32, np.float64
HALVES = [np.float16, ml_dtypes.bfloat16]
FLOATS = [*HALVES, np.float32, np.float64]
CANARY = F32(-7.25)
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def silent_overflow():
    """What means nothing may overflow."""
    with np.errstate(all="ignore"):
        yield


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def whole(n: int) -> int:
    """The next multiple of 16, which scratch has room for."""
    return -(-n // 16) * 16


def nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, F32)


def apart(x: np.ndarray) -> np.ndarray:
    """The same numbers with a gap between rows: one array type to compile for, as the worker has it."""
    page = np.zeros((x.shape[0], x.shape[1] + 3), x.dtype)
    page[:, 1:-2] = x
    return page[:, 1:-2]


# Phases that value heads share


@pytest.mark.parametrize("dtype", [*HALVES, np.float32])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("normalise", [False, True])
def test_load_pair(normalise: bool, turned: bool, dtype: Any) -> None:
    scale = F32(-0.3)
    for n, dk in [(5, 1), (5, 7), (7, 37), (16, 16), (16, 128), (13, 130)]:
        q, k = (3 * random(2, n, dk)).astype(dtype)
        pair = nan(3 * C, whole(dk))
        tokens = tuple(as_words(apart(x.T).T if turned else apart(x)) for x in (q, k))
        phases_k.load_pair(tokens, KINDS[np.dtype(dtype)], (normalise, scale), pair, nan(3 * C), nan(C * whole(dk)))
        wide_q, wide_k = q.astype(F64), k.astype(F64)
        if normalise:
            wide_q, wide_k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (wide_q, wide_k))
        np.testing.assert_allclose(pair[:n, :dk], wide_k, rtol=4e-7)
        np.testing.assert_allclose(pair[n : 2 * n, :dk], F64(scale) * wide_q, rtol=5e-7)
        if not normalise:
            assert np.array_equal(pair[:n, :dk], k.astype(F32))


@pytest.mark.parametrize("n", [1, 5, 8, 15, 16])
@pytest.mark.parametrize("dk", [1, 7, 37, 128, 130])
def test_raw_scores(n: int, dk: int) -> None:
    pair, k_turned, raw = nan(3 * C, whole(dk)), nan(whole(dk), C), nan(3 * C, C)
    pair[: 2 * n, :dk] = random(2 * n, dk) / np.sqrt(dk)
    phases_k.compute_raw_scores(n, dk, pair, k_turned, raw)
    assert np.array_equal(k_turned[:dk, :n], pair[:n, :dk].T)
    expected = pair[: 2 * n, :dk].astype(F64) @ pair[:n, :dk].astype(F64).T
    np.testing.assert_allclose(raw[: 2 * n, :n], expected, rtol=1e-5, atol=1e-6)


# States


def state_views(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same elements [D1, D2] in memory of their own, in several layouts."""
    pages = np.zeros((2, x.shape[0] + 2, 2 * x.shape[1] + 5), x.dtype)
    odd = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape[::-1])
    views = {
        "rows": pages[0, 1:-1, 3 : 3 + x.shape[1]],
        "columns": np.zeros(x.shape[::-1], x.dtype).T,
        "spaced": pages[1, 1:-1, 4 : 4 + 2 * x.shape[1] : 2],
        "backwards": np.zeros_like(x)[::-1, ::-1],
        "columns at an odd address": odd.T,
    }
    for view in views.values():
        view[...] = x
    return views


STATES = [(1, 1), (5, 7), (7, 5), (37, 53), (16, 130), pytest.param(128, 128, marks=slow)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize(("dk", "dv"), STATES)
def test_states_are_loaded_and_stored_by_tiles(dk: int, dv: int, is_v_first: bool, dtype: Any) -> None:
    form = (KINDS[np.dtype(dtype)], is_v_first)
    for width in {16, 32, whole(dv)}:
        for c0 in range(0, dv, width):
            c1 = min(c0 + width, dv)
            elements = random(dk, dv).astype(dtype)
            for name, view in state_views(elements.T if is_v_first else elements).items():
                state, turn = nan(whole(dk), width), nan(C * max(whole(dk), width))
                phases_v.load_state(as_words(view), form, (c0, c1), state, turn)
                assert np.array_equal(state[:dk, : c1 - c0], elements[:, c0:c1].astype(F32)), name

                updated = random(dk, c1 - c0, seed=1)
                state[:dk, : c1 - c0] = updated
                phases_v.store_state(state, form, (c0, c1), as_words(view), nan(turn.size))
                expected = elements.copy()
                expected[:, c0:c1] = updated.astype(dtype)
                assert np.array_equal(view.T if is_v_first else view, expected), name


@pytest.mark.parametrize("is_v_first", [False, True])
def test_nothing_beside_a_state_is_written(is_v_first: bool) -> None:
    page = np.full((40, 40), CANARY, F32)
    inside = page[3:16, 5:26]
    dk, dv = inside.shape[::-1] if is_v_first else inside.shape
    state = nan(whole(dk), whole(dv))
    state[:dk, :dv] = random(dk, dv)
    words = as_words(page)[3:16, 5:26]
    phases_v.store_state(state, (FP32, is_v_first), (0, dv), words, nan(C * 32))
    assert np.array_equal(inside.T if is_v_first else inside, state[:dk, :dv])
    inside[...] = CANARY
    assert (page == CANARY).all()


# A head


def head_rows(dk: int, width: int) -> HeadRows:
    """Scratch of a head that holds NaN."""
    gates = Gates(np.full(C, np.nan), *(nan(C) for _ in range(5)))
    key = whole(dk)
    return HeadRows(
        nan(3 * C, key), nan(C, C), nan(C, C), gates, nan(key), nan(3 * C, width), nan(C, width),
        nan(width // 16), nan(C * max(key, width)),
    )  # fmt: skip


def head_result(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray, bool]:
    """Out and state of one head's chunk through the phases, and whether they went through."""
    (n, dk), columns = k.shape, v.shape[1]
    x, raw = head_rows(dk, whole(columns)), nan(3 * C, C)
    phases_k.load_pair((as_words(apart(q)), as_words(apart(k))), FP32, (False, F32(1)), x.pair, nan(3 * C), x.turn)
    phases_k.compute_raw_scores(n, dk, x.pair, nan(whole(dk), C), raw)
    assert load_gates(as_words(g), as_words(beta), (FP32, FP32), x.gates)
    decay_scores(raw[:n], raw[n : 2 * n], x.gates, x.b, x.m)
    out, tile = nan(n, columns + 1), nan(whole(dk), whole(columns))
    tile[:dk, :columns] = state
    values = (as_words(apart(v)), as_words(out)[:, :columns], FP32, False)
    nothing = as_words(apart(v))[:0]
    bounds = np.full(whole(columns), np.inf, F32)
    sizes = (dk, bounds, np.abs(x.pair[: 2 * n, :dk]).max())
    done = phases_v.run_head(values, (nothing, nothing, nothing), tile, sizes, x)
    if done:
        largest = [np.abs(tile[:dk, c : min(c + 16, columns)]).max() for c in range(0, columns, 16)]
        assert (bounds[: len(largest)] >= largest).all()
    return out[:, :columns], tile[:dk, :columns], done


def loop(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same in float64, token by token."""
    s, out = state.astype(F64), []
    for i in range(len(k)):
        s = np.exp(F64(g[i])) * s
        s = s + np.outer(k[i].astype(F64), F64(beta[i]) * (v[i] - k[i] @ s))
        out.append(q[i] @ s)
    return np.array(out), s


def head_operands(n: int, dk: int, columns: int, steep: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([n, dk, columns])
    q, k = (random(n, dk, seed=i) for i in range(2))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    g, beta = (-steep * rng.random(n)).astype(F32), rng.random(n).astype(F32)
    return q, k, random(n, columns, seed=2), g, beta, random(dk, columns, seed=3)


@pytest.mark.parametrize("steep", [0.1, 30.0], ids=["factors", "differences"])
@pytest.mark.parametrize(("dk", "columns"), [(1, 1), (5, 7), (37, 53), (16, 130), (128, 64)])
def test_run_head(dk: int, columns: int, steep: float) -> None:
    for n in range(2, C + 1):
        operands = head_operands(n, dk, columns, steep)
        out, state, done = head_result(*operands)
        expected_out, expected_state = loop(*operands)
        assert done
        limit = 1e-5 * np.sqrt(dk)
        np.testing.assert_allclose(out, expected_out, rtol=0, atol=limit)
        np.testing.assert_allclose(state, expected_state, rtol=0, atol=limit)


def test_a_head_that_leaves_float32_keeps_its_state() -> None:
    q, k, v, g, beta, state = head_operands(9, 8, 20)
    v[4, 19] = np.inf
    _, kept, done = head_result(q, k, v, g, beta, state)
    assert not done
    assert np.array_equal(kept, state)


def test_columns_of_a_head_do_not_depend_on_their_mates() -> None:
    q, k, v, g, beta, state = head_operands(13, 20, 70)
    out, final, _ = head_result(q, k, v, g, beta, state)
    for columns in (slice(0, 16), slice(16, 48), slice(48, 70), slice(3, 4)):
        some, some_final, _ = head_result(q, k, v[:, columns], g, beta, state[:, columns])
        assert np.array_equal(some, out[:, columns])
        assert np.array_equal(some_final, final[:, columns])


# Scratch


def leaves(value: Any) -> list[np.ndarray]:
    """All arrays of nested tuples."""
    return [value] if isinstance(value, np.ndarray) else [leaf for part in value for leaf in leaves(part)]


@pytest.mark.parametrize(("dk", "dv", "width", "n_states"), [
    (1, 1, 16, 1), (5, 7, 16, 3), (37, 53, 64, 1), (37, 53, 16, 2), (16, 130, 144, 2), (128, 128, 128, 3),
])  # fmt: skip
def test_slices_of_an_arena(dk: int, dv: int, width: int, n_states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill the arena that chunk_bytes asks for, lie apart, and begin on cache lines."""
    plain = [getattr(function, "py_func", function) for function in (chunk_arena.take_chunk_rows, step.take_rows)]
    monkeypatch.setattr(chunk_arena, "take_rows", plain[1])
    n_bytes = chunk_arena.chunk_bytes(dk, dv, width, n_states)
    arena = np.zeros(n_bytes // 4, F32)
    rows = plain[0](arena, (dk, dv), width, n_states)
    taken = np.zeros(n_bytes, np.int64)
    base = arena.ctypes.data
    for leaf in leaves(rows):
        assert leaf.flags.c_contiguous
        begin = leaf.ctypes.data - base
        assert begin % 64 == 0
        assert begin >= 0
        assert begin + leaf.nbytes <= n_bytes
        taken[begin : begin + leaf.nbytes] += 1
    assert taken.max() == 1
    assert rows.states.shape == (n_states, whole(dk), width)
    assert rows.head.turn.size >= C * max(whole(dk), width)
    assert rows.step.delta.size >= min(dv, width)
