"""Each piece of the faithful step over a pool alone, against a few lines of NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.dtypes import KINDS, as_words
from cgdr_numba.core.faithful import pool_phases as phases
from cgdr_numba.core.faithful.arith import Arith
from cgdr_numba.core.faithful.pool_ub import take_pool_slices
from cgdr_numba.core.faithful.pool_worker import tile_rows
from cgdr_numba.core.phases import STEP_PHASES
from cgdr_numba.core.schedule import PoolSchedule
from pool_cases import DTYPES
from pool_plans import G, plan_of, sizes

SATURATE = Arith(fused=False, saturate=True)
ARITHS = [None, SATURATE]
L, DK, ALIGN_K, ROWS, BLOCKS = 3, 20, 32, 18, 2


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers."""
    return np.random.default_rng(5)


def nan(*shape: int) -> Any:
    """Memory that holds nothing of use."""
    return np.full(shape, np.nan, np.float32)


def blocks_of(rows: np.ndarray) -> np.ndarray:
    """Rows [ROWS, DK] as blocks of 16, zeros behind them."""
    wide = np.zeros((BLOCKS * 16, ALIGN_K), np.float32)
    wide[: len(rows), :DK] = rows
    return np.ascontiguousarray(wide.reshape(BLOCKS, 16, ALIGN_K).swapaxes(1, 2)).reshape(BLOCKS, ALIGN_K * 16)


def rows_of(state: np.ndarray) -> np.ndarray:
    """Blocks as rows [BLOCKS * 16, ALIGN_K]."""
    return state.reshape(BLOCKS, ALIGN_K, 16).swapaxes(1, 2).reshape(BLOCKS * 16, ALIGN_K)


def dots(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Every row's dot over ALIGN_K < 64 lanes: one product after another."""
    total = np.zeros(len(rows), np.float32)
    for d in range(ALIGN_K):
        total = total + rows[:, d] * x[d]
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_widened_and_padded(rng: np.random.Generator, dtype: Any) -> None:
    x = rng.standard_normal((L, DK)).astype(dtype)
    y = nan(8, ALIGN_K)
    phases.load_rows(as_words(x), KINDS[x.dtype], y)
    np.testing.assert_array_equal(y[:L, :DK], x.astype(np.float32))
    assert not y[:L, DK:].any()
    assert np.isnan(y[L:]).all()


def test_head_values_lie_token_by_token(rng: np.random.Generator) -> None:
    x = rng.standard_normal((L, 4)).astype(np.float16)
    y = nan(1, 8 * 4)
    phases.load_head_values(as_words(x), KINDS[x.dtype], y)
    np.testing.assert_array_equal(y[0, : L * 4], x.astype(np.float32).ravel())
    assert np.isnan(y[0, L * 4 :]).all()


def test_decays_are_exponentials(rng: np.random.Generator) -> None:
    x = rng.standard_normal((L, 4)).astype(np.float32)
    x[0, 0] = 100
    for arith in ARITHS:
        y = nan(1, 8 * 4)
        with np.errstate(over="ignore"):
            phases.load_decays(as_words(x), KINDS[x.dtype], arith, y)
            exact = np.exp(x.astype(np.float64)).astype(np.float32).ravel()
        expected = np.nan_to_num(exact) if arith else exact
        np.testing.assert_array_equal(y[0, : L * 4], expected)
    columns = rng.standard_normal((L, DK)).astype(np.float32)
    y = nan(8, ALIGN_K)
    phases.load_column_decays(as_words(columns), KINDS[x.dtype], None, y)
    np.testing.assert_array_equal(y[:L, :DK], np.exp(columns.astype(np.float64)).astype(np.float32))


def test_queries_are_scaled_in_place(rng: np.random.Generator) -> None:
    q = rng.standard_normal((8, ALIGN_K)).astype(np.float32)
    before = q.copy()
    phases.scale_query(L, DK, np.float32(0.3), None, q)
    np.testing.assert_array_equal(q[:L, :DK], before[:L, :DK] * np.float32(0.3))
    np.testing.assert_array_equal(q[L:], before[L:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_come_in_through_one_buffer(rng: np.random.Generator, dtype: Any) -> None:
    x = rng.standard_normal((ROWS, DK)).astype(dtype)
    kind, words = KINDS[x.dtype], as_words(x)
    queue = np.full(BLOCKS * 16 * ALIGN_K, 0x7E00, np.uint16)
    state = nan(BLOCKS, ALIGN_K * 16)
    phases.prefetch_state(words, kind, ALIGN_K, queue)
    if dtype != np.float32:
        x = x.copy()
        words = np.zeros_like(words)  # what was prefetched is taken, whatever became of the memory
    phases.take_state(words, kind, ALIGN_K, BLOCKS, queue, state)
    np.testing.assert_array_equal(state, blocks_of(x.astype(np.float32)))


@pytest.mark.parametrize("arith", ARITHS)
def test_states_decay(rng: np.random.Generator, arith: Arith | None) -> None:
    x = rng.standard_normal((ROWS, DK)).astype(np.float32)
    factor, factors = np.float32(0.7), rng.random(ALIGN_K).astype(np.float32)
    state = blocks_of(x)
    phases.decay_state(factor, BLOCKS, DK, arith, state)
    np.testing.assert_array_equal(state, blocks_of(x * factor))
    phases.decay_columns(factors, BLOCKS, DK, arith, state)
    np.testing.assert_array_equal(state, blocks_of(x * factor * factors[:DK]))


@pytest.mark.parametrize("arith", ARITHS)
def test_rows_learn_and_are_read(rng: np.random.Generator, arith: Arith | None) -> None:
    x = rng.standard_normal((ROWS, DK)).astype(np.float32)
    k, q = (np.zeros(ALIGN_K, np.float32) for _ in range(2))
    k[:DK], q[:DK] = rng.standard_normal((2, DK))
    v, beta = rng.standard_normal(BLOCKS * 16).astype(np.float32), np.float32(0.6)
    state, product, sums, attn = blocks_of(x), nan(ALIGN_K), nan(16), nan(BLOCKS * 16)
    phases.learn_rows(k, v, beta, BLOCKS, DK, arith, product, sums, state)
    rows = rows_of(blocks_of(x))
    delta = (v - dots(rows, k)) * beta
    learnt = rows + k * delta[:, np.newaxis]
    np.testing.assert_array_equal(rows_of(state), learnt)
    phases.read_rows_out(q, BLOCKS, arith, state, product, sums, attn)
    np.testing.assert_array_equal(attn, dots(learnt, q))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_leave_through_a_buffer(rng: np.random.Generator, dtype: Any) -> None:
    """16-bit words are queued and copied; others are written at once."""
    x = rng.standard_normal((ROWS, DK)).astype(np.float32)
    attn = rng.standard_normal(BLOCKS * 16).astype(np.float32)
    out, pool = np.zeros(ROWS, dtype), np.zeros((ROWS, DK), dtype)
    kind, is_queued = KINDS[out.dtype], dtype != np.float32
    buffer, state_buffer = np.zeros(BLOCKS * 16, np.uint16), np.zeros(BLOCKS * 16 * ALIGN_K, np.uint16)
    phases.queue_attn(attn, kind, None, buffer, as_words(out))
    phases.queue_state(blocks_of(x), kind, ALIGN_K, None, state_buffer, as_words(pool))
    assert out.any() != is_queued
    assert pool.any() != is_queued
    phases.copy_attn(buffer, kind, as_words(out))
    phases.copy_state(state_buffer, kind, ALIGN_K, as_words(pool))
    np.testing.assert_array_equal(out, attn[:ROWS].astype(dtype))
    np.testing.assert_array_equal(pool, x.astype(dtype))


def test_casts_saturate_where_that_is_asked_for() -> None:
    attn = np.array([1e6, -np.inf, np.nan, 1.0] + [0.0] * 12, np.float32)
    for dtype, largest in ((np.float16, 65504.0), (ml_dtypes.bfloat16, 1e6), (np.float32, 1e6)):
        out, buffer = np.zeros(4, dtype), np.zeros(16, np.uint16)
        kind = KINDS[out.dtype]
        phases.queue_attn(attn, kind, SATURATE, buffer, as_words(out))
        phases.copy_attn(buffer, kind, as_words(out))
        lowest = {np.float16: -65504.0}.get(dtype, float(ml_dtypes.finfo(dtype).min))
        np.testing.assert_array_equal(out.astype(np.float64)[1:], [lowest, 0.0, 1.0])
        assert float(out[0]) == pytest.approx(largest, rel=4e-3)


def test_tiles_of_a_head() -> None:
    plan = PoolSchedule(32, 3, 1, 2, True, False, False)
    tiles = [tuple(tile_rows(t, plan, 70)) for t in range(3)]
    assert tiles == [(0, 32, 2), (32, 64, 2), (64, 70, 1)]


@pytest.mark.parametrize("form", ["none", "scalar", "vector"])
def test_slices_are_the_ledgers(form: Any) -> None:
    """Every view begins at its offset and has its piece's size."""
    dims = sizes(4, 20, 70)
    plan = plan_of(dims, G._replace(has_g=form != "scalar", gk=form), v_step=32)
    ledger = plan.ledger
    arena = np.zeros(ledger.total_bytes // 4, np.float32)
    plain = getattr(take_pool_slices, "py_func", take_pool_slices)  # views that kernels return have no owner
    slices = plain(arena, ledger.layout(), plan.schedule(), Dims(*dims))
    pieces = {piece.name: piece for piece in (*ledger.queues, *ledger.scratch)}
    for name in slices._fields:
        view = getattr(slices, name)
        if name in pieces:
            assert view.ctypes.data - arena.ctypes.data == pieces[name].offset, name
            # beta is rounded up to a block; the rounding belongs to nobody.
            assert view.nbytes <= pieces[name].n_bytes < view.nbytes + 64, name


def test_the_table_names_every_piece_and_slices_of_the_ledger() -> None:
    helpers = {"is_queued", "dot_rows"}
    defined = {name for name, x in vars(phases).items() if getattr(x, "__module__", "") == phases.__name__}
    assert defined - helpers == {phase.name for phase in STEP_PHASES}
    ledgers = [plan_of(sizes(4, 20, 70), G._replace(gk=form)).ledger for form in ("none", "vector")]
    names = {piece.name for ledger in ledgers for piece in (*ledger.queues, *ledger.scratch)} | {"gm"}
    for phase in STEP_PHASES:
        assert {*phase.reads, *phase.writes} <= names, phase.name
