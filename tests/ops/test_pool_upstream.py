"""The recurrent kernel's upstream tests, and those of its siblings, with their data and tolerances."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pool_cases import PoolCase, every_backend, pool_loop, run
from reference import unit

slow = pytest.mark.slow


def upstream(
    seed: int,
    batch: int,
    n_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    *,
    gates: str = "g",
    size: float = 0.05,
    slots: Any = None,
    n_slots: int | None = None,
    accepted: Any = None,
) -> PoolCase:
    """Q and k of length 1, v and states size * N, beta 0.1 + 0.8 U, gates -(U + 0.01), as the 310P's test has them."""
    rng = np.random.default_rng(seed)
    (hk, hv), (dk, dv), t = heads, dims, batch * n_tokens
    return PoolCase(
        query=unit(rng, t, hk, dk),
        key=unit(rng, t, hk, dk),
        value=size * rng.standard_normal((t, hv, dv)),
        state=size * rng.standard_normal((n_slots or batch, hv, dv, dk)),
        beta=0.1 + 0.8 * rng.random((t, hv)),
        lengths=(n_tokens,) * batch,
        slots=np.repeat(np.arange(batch), n_tokens) if slots is None else slots,
        accepted=accepted,
        g=-(rng.random((t, hv)) + 0.01).astype(np.float32),
        gk=-(rng.random((t, hv, dk)) + 0.01).astype(np.float32) if "vector" in gates else None,
        scale=dk**-0.5,
    )


def assert_close(case: PoolCase, backend: str, *, rtol: float, atol: float) -> None:
    """Out and the pool keep |a - e| <= atol + rtol |e| everywhere."""
    result, truth = run(case, backend), pool_loop(case)
    np.testing.assert_allclose(result.out.astype(np.float64), truth.out, rtol=rtol, atol=atol)
    np.testing.assert_allclose(result.pool.astype(np.float64), truth.pool, rtol=rtol, atol=atol)


@slow
@every_backend
@pytest.mark.parametrize(("batch", "n_tokens"), [(1, 1), (2, 1), (2, 4)], ids=str)
def test_310p_accuracy(backend: str, batch: int, n_tokens: int) -> None:
    """The first two are upstream's; no upstream test has several tokens on the 310P."""
    case = upstream(
        2026 + 10 * batch + n_tokens,
        batch,
        n_tokens,
        (16, 32),
        (128, 128),
        gates="g vector",
        accepted=[n_tokens] * batch,
    )
    assert_close(case.cast(np.float16), backend, rtol=1e-3, atol=1e-3)


@every_backend
def test_910b_accuracy_in_bfloat16(backend: str) -> None:
    case = upstream(1, 1, 1, (2, 2), (64, 512)).cast(ml_dtypes.bfloat16)
    assert_close(case, backend, rtol=0, atol=0.05)


@slow
@every_backend
def test_910b_accuracy_in_bfloat16_with_all_its_heads(backend: str) -> None:
    assert_close(upstream(1, 1, 1, (64, 64), (64, 512)).cast(ml_dtypes.bfloat16), backend, rtol=0, atol=0.05)


@slow
@every_backend
def test_xllm_ops(backend: str) -> None:
    case = upstream(2, 2, 1, (4, 8), (128, 128)).cast(ml_dtypes.bfloat16)
    assert_close(case, backend, rtol=1e-2, atol=4e-3)
    prefixed = case.but(lengths=(0, 1, 1))
    expected = run(case, backend)
    result = run(prefixed, backend, seq_lens_format="start+lengths")
    np.testing.assert_array_equal(result.pool, expected.pool)


@slow
@every_backend
@pytest.mark.parametrize(
    ("batch", "n_tokens", "heads", "width", "n_slots"),
    [(1, 1, (8, 16), 128, 444), (2, 2, (8, 16), 128, 444), (4, 2, (4, 4), 64, 32)],
    ids=str,
)
def test_vllm_ascend_310p_with_growing_states(
    backend: str, batch: int, n_tokens: int, heads: tuple[int, int], width: int, n_slots: int
) -> None:
    """Random slots of a large pool, one token accepted, and g = U(0, 1) above 0."""
    rng = np.random.default_rng(7 + batch)
    used = rng.permutation(n_slots)[: batch * n_tokens]
    compact = np.arange(batch * n_tokens)
    case = upstream(
        3, batch, n_tokens, heads, (width, width), size=1.0, slots=compact, n_slots=len(used), accepted=[1] * batch
    ).cast(np.float16)
    case = case.but(g=rng.random(case.g.shape).astype(np.float32))
    pool = np.zeros((n_slots, *case.state.shape[1:]), np.float16)
    pool[used] = case.state
    result, truth = run(case.but(slots=used), backend, pool=pool), pool_loop(case)
    assert np.abs(result.out - truth.out).max() < 2e-3
    assert np.abs(pool[used] - truth.pool).max() < 1e-3 * np.abs(truth.pool).max()
    assert np.flatnonzero(pool.any(axis=(1, 2, 3))).tolist() == sorted(used.tolist())


@every_backend
def test_vllm_ascend_graphs_with_padded_rows(backend: str) -> None:
    """Rows behind the summed lengths have slot -1; the pool is float32."""
    case = upstream(4, 4, 1, (2, 4), (64, 32), size=1.0, n_slots=9, slots=[4, 8, -1, -1]).cast(np.float16, np.float32)
    for lengths in ((1, 1), (1, 1, 0, 0), (1, 1, 1, 1)):
        padded = case.but(lengths=lengths)
        assert_close(padded, backend, rtol=3e-3, atol=1e-2)
        assert not run(padded, backend).out[2:].any()
