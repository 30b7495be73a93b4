"""Each phase of the faithful kernel alone, against a few lines of NumPy."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba.core import phases
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.dtypes import FP16, FP32, as_words
from cgdr_numba.core.faithful import phases_k, phases_v
from cgdr_numba.core.faithful.ub import take_slices
from cgdr_numba.sched.ledger import UbLedger

F32, F64 = np.float32, np.float64
L, DK, DV, WIDTH = 5, 4, 6, 16


@pytest.fixture(autouse=True)
def silent_overflow():
    """Poison goes through lanes that nobody reads."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def ub() -> Any:
    """Slices of a poisoned arena for Dk = 4 and one V tile of 16 columns, with state bytes of its own."""
    ledger = UbLedger.for_chunk(Dims(L, 1, 1, 1, DK, DV), WIDTH, False, 10**6)
    python_function = getattr(take_slices, "py_func", take_slices)
    return python_function(np.full(ledger.total_bytes // 4, np.nan, F32), ledger.layout(), DK)


def random(*shape: int, dtype: Any = F32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("dtype", "kind", "by_dma"), [("f2", FP16, True), ("f2", FP16, False), ("f4", FP32, False)])
def test_load_chunk_key(ub: Any, dtype: str, kind: int, by_dma: bool) -> None:
    k = random(L, DK, dtype=dtype)
    phases_k.load_chunk_key(as_words(k), kind, by_dma, ub.v_half, ub.k)
    assert np.array_equal(ub.k[:L, :DK], k.astype(F32))
    assert np.isnan(ub.k[L:]).all()
    assert np.isnan(ub.k[:, DK:]).all()


def test_compute_g_cumsum_is_a_running_float32_sum(ub: Any) -> None:
    g = np.array([1, 2.0**-25, 2.0**-25, -3, 0.1], F32)
    phases_k.compute_g_cumsum(as_words(g), FP32, ub.g_cum)
    assert ub.g_cum[0, :L].tolist() == [1, 1, 1, -2, F32(-2) + F32(0.1)]
    assert np.isnan(ub.g_cum[0, L:]).all()


def test_compute_k_beta(ub: Any) -> None:
    ub.k[:L, :DK], beta = random(L, DK), random(L, dtype="f2")
    phases_k.compute_k_beta(as_words(beta), FP16, DK, None, ub.k, ub.k_beta)
    assert np.array_equal(ub.k_beta[:L, :DK], ub.k[:L, :DK] * beta.astype(F32)[:, None])
    assert np.isnan(ub.k_beta[:, DK:]).all()


def test_prepare_decay_and_exp(ub: Any) -> None:
    g_cum = np.cumsum(-np.abs(random(L)))
    ub.g_cum[0, :L] = g_cum
    phases_k.prepare_decay_and_exp(L, None, ub.g_cum, ub.delta, ub.exp_g, ub.decay)
    close(ub.exp_g[0, :L], np.exp(g_cum.astype(F64)))
    close(ub.decay[:L, :L], np.exp(g_cum[:, None].astype(F64) - g_cum))
    assert np.array_equal(np.diag(ub.decay)[:L], np.ones(L))


def test_prepare_attn_query_cache(ub: Any) -> None:
    q = random(L, DK, dtype="f2")
    phases_k.prepare_attn_query_cache(as_words(q), F32(0.3), None, ub.v_half, ub.q_cache)
    assert np.array_equal(ub.q_cache[:L], q.astype(F32) * F32(0.3))
    assert np.shares_memory(ub.q_cache, ub.attn_out)


def lower(matrix: np.ndarray, k: int) -> np.ndarray:
    return np.tril(matrix.astype(F64), k)


def test_scores_are_the_inverse_of_the_unit_lower_matrix(ub: Any) -> None:
    ub.k[:L, :DK], ub.k_beta[:L, :DK] = random(L, DK), random(L, DK, seed=1)
    ub.decay[:L, :L] = np.abs(random(L, L))
    phases_k.compute_scores(L, DK, None, ub.k_beta, ub.k, ub.decay, ub.v, ub.dot, ub.scores)
    direct = lower(-(ub.k_beta[:L, :DK] @ ub.k[:L, :DK].T) * ub.decay[:L, :L], -1)
    close(lower(ub.scores[:L, :L], -1), direct)
    phases_k.compute_recursive_attn(L, None, ub.delta, ub.scores)
    inverse = np.linalg.inv(np.eye(L) - direct)
    np.testing.assert_allclose(lower(ub.scores[:L, :L], 0), inverse, rtol=1e-5, atol=1e-5)
    assert np.isnan(ub.scores[np.triu_indices(L, 1)]).all()


def test_attention_by_cache_and_by_rereading(ub: Any) -> None:
    q, decay = random(L, DK, dtype="f2"), np.abs(random(L, L))
    ub.k[:L, :DK] = random(L, DK)
    results = []
    for cached in (True, False):
        ub.decay[:L, :L] = decay
        if cached:
            ub.q_cache[:L] = q.astype(F32) * F32(0.3)
            phases_k.compute_attn_cached(L, None, ub.q_cache, ub.k, ub.v, ub.dot, ub.decay)
        else:
            phases_k.compute_attn_reread(as_words(q), FP16, F32(0.3), None, ub.k, ub.v, ub.delta, ub.dot, ub.decay)
        results.append(ub.decay[:L, :L].copy())
    close(lower(results[0], 0), lower(0.3 * (q.astype(F64) @ ub.k[:L, :DK].T) * decay, 0))
    assert np.array_equal(*results)
    assert np.array_equal(np.triu(results[0], 1), np.triu(decay, 1))


def test_compute_k_cumdecay(ub: Any) -> None:
    k_beta, exp_g, scores = random(L, DK), np.abs(random(L)), random(L, L)
    ub.k_beta[:L, :DK], ub.exp_g[0, :L], ub.scores[:L, :L] = k_beta, exp_g, scores
    phases_k.compute_k_cumdecay(L, DK, None, ub.exp_g, ub.scores, ub.k_beta, ub.k)
    close(ub.k[:L, :DK], lower(scores, 0) @ (exp_g[:, None] * k_beta))


@pytest.mark.parametrize("by_dma", [True, False])
def test_v_is_loaded_into_a_cleared_tile_and_scaled(ub: Any, by_dma: bool) -> None:
    v, beta = random(L, DV, dtype="f2"), random(L, dtype="f2")
    phases_v.load_v(as_words(v), FP16, by_dma, ub.attn_half, ub.v)
    phases_v.scale_v_by_beta(as_words(beta), FP16, None, ub.v)
    assert np.array_equal(ub.v[:L, :DV], v.astype(F32) * beta.astype(F32)[:, None])
    assert not ub.v[:, DV:].any()
    assert not ub.v[L:].any()


def test_compute_value_new(ub: Any) -> None:
    scores, v = random(L, L), random(L, WIDTH)
    ub.scores[:L, :L], ub.v[:L] = scores, v
    phases_v.compute_value_new(L, None, ub.scores, ub.v, ub.attn_out)
    close(ub.attn_out[:L], lower(scores, 0) @ v)


def test_state_tile_is_transposed_in_and_out(ub: Any) -> None:
    state = random(DV, DK, dtype="f2")
    phases_v.load_state_tile(as_words(state), FP16, ub.state)
    assert np.array_equal(ub.state[:DK, :DV], state.T.astype(F32))
    assert not ub.state[DK:].any()
    assert not ub.state[:, DV:].any()
    for dtype, kind in (("f2", FP16), ("f4", FP32)):
        final = np.full((DV, DK), np.nan, dtype)
        phases_v.write_final_state(ub.state, kind, None, ub.out_queue, as_words(final))
        assert np.array_equal(final, state.astype(dtype))


def test_state_tile_goes_to_the_workspace_and_back(ub: Any) -> None:
    ub.state[:, :] = random(8, WIDTH)
    expected, workspace = ub.state[:DK, :8].copy(), np.full((DK, 24), np.nan, F32)
    phases_v.store_state_tile(ub.state, workspace[:, 16:24])
    ub.state[:, :] = np.nan
    phases_v.reload_state_tile(workspace[:, 16:24], ub.state)
    assert np.array_equal(ub.state[:DK, :8], expected)
    assert not ub.state[DK:].any()
    assert np.isnan(workspace[:, :16]).all()


def test_compute_v_new(ub: Any) -> None:
    k_cd, state, value_new = random(L, DK), random(DK, WIDTH), random(L, WIDTH)
    ub.k[:L, :DK], ub.state[:DK], ub.attn_out[:L] = k_cd, state, value_new
    phases_v.compute_v_new(L, DK, None, ub.k, ub.state, ub.attn_out, ub.v)
    close(ub.v[:L], value_new - k_cd.astype(F64) @ state)


def test_output_adds_both_parts_and_is_cast(ub: Any) -> None:
    q, exp_g, state = random(L, DK, dtype="f2"), np.abs(random(L)), random(DK, WIDTH)
    scores, v_new = random(L, L), random(L, WIDTH)
    ub.exp_g[0, :L], ub.state[:DK], ub.decay[:L, :L], ub.v[:L] = exp_g, state, scores, v_new
    phases_v.compute_attn_inter(as_words(q), FP16, F32(0.3), None, ub.exp_g, ub.state, ub.delta, ub.attn_out)
    inter = (0.3 * q.astype(F64) * exp_g[:, None]) @ state
    close(ub.attn_out[:L], inter)
    phases_v.accum_output(L, None, ub.decay, ub.v, ub.attn_out)
    close(ub.attn_out[:L], inter + lower(scores, 0) @ v_new)
    for dtype, kind in (("f2", FP16), ("f4", FP32)):
        out = np.full((L, DV), np.nan, dtype)
        phases_v.write_attn_tile(ub.attn_out, kind, None, ub.out_queue, as_words(out))
        assert np.array_equal(out, ub.attn_out[:L, :DV].astype(dtype))


def test_update_state(ub: Any) -> None:
    k, state, v_new = random(L, DK, dtype="f2"), random(DK, WIDTH), random(L, WIDTH)
    g_cum = np.cumsum(-np.abs(random(L))).astype(F32)
    ub.g_cum[0, :L], ub.exp_g[0, :L], ub.state[:DK], ub.v[:L] = g_cum, np.exp(g_cum), state, v_new
    phases_v.update_state(as_words(k), FP16, None, ub.exp_g, ub.g_cum, ub.v, ub.delta, ub.dot, ub.state)
    weights = k.astype(F64) * np.exp(g_cum[-1].astype(F64) - g_cum)[:, None]
    close(ub.state[:DK], np.exp(g_cum[-1].astype(F64)) * state + weights.T @ v_new)


def test_the_table_names_the_phases_that_exist() -> None:
    helpers = {"stage_rows", "cast_rows", "read_rows", "scale_query_row", "clear", "copy_columns"}
    helpers |= {"attend_row", "attend_columns"}
    for module, level in ((phases_k, "chunk"), (phases_v, "V tile")):
        defined = {
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(getattr(value, "py_func", value), "__module__", "") == module.__name__
        }
        assert defined - helpers == {phase.name for phase in phases.CHUNK_PHASES if phase.level == level}
    slices = {piece.name for piece in UbLedger.for_chunk(Dims(1, 1, 1, 1, 1, 1), 16, True, 1).slices} | {"gm"}
    for phase in phases.CHUNK_PHASES:
        assert set(phase.reads) | set(phase.writes) <= slices
