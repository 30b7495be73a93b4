"""The kernel's own upstream tests (latency aside), each with the relative rms beside its tolerance."""

import numpy as np
import pytest

from cgdr_numba import npu_chunk_gated_delta_rule
from judge import assert_same_bits, run_cann
from reference import Array, Case, Result, part, relative_rms, rr_out, rr_state, token_loop

FP16_RMS = 4e-4
"""What rounding fp16 results leaves, with a little of the kernel's own error."""


def upstream(b: int, heads: tuple[int, int], t: int, dims: tuple[int, int], zero_state: bool = False) -> Case:
    """Random data as the upstream tests draw it, rounded to float16 before both sides; g stays float32."""
    rng = np.random.default_rng(42)
    (hk, hv), (dk, dv) = heads, dims
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in rng.standard_normal((2, b, t, hk, dk)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((b, t, hv))))
    state = np.zeros((b, hv, dk, dv)) if zero_state else rng.standard_normal((b, hv, dk, dv))
    case = Case(q, k, rng.standard_normal((b, t, hv, dv)), np.zeros((b, t, hv)), beta, state).cast(np.float16)
    return case.but(g=-(rng.random((b, t, hv)) + 0.01).astype(np.float32))


def run_without_g(case: Case, backend: str) -> Result:
    """The case through the operator with g left out."""
    if backend == "recurrent":
        pytest.skip("the CANN family has no recurrent function yet")
    q, k, v, beta = (x.reshape(-1, *x.shape[2:]) for x in (case.q, case.k, case.v, case.beta))
    state = case.initial_state().swapaxes(2, 3)
    out, final = npu_chunk_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        initial_state=state,
        actual_seq_lengths=case.lengths,
        scale=case.factor,
        backend=backend,
    )
    return Result(out.reshape(case.v.shape), final.swapaxes(2, 3))


def cosine(a: Array, b: Array) -> float:
    """Upstream's cosine."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12))


def largest_difference(a: Array, b: Array) -> float:
    """Upstream's largest absolute difference."""
    return float(np.abs(a.astype(np.float64) - b).max())


def assert_upstream(case: Case, actual: Result, expected: Result, limits: tuple[float, float]) -> None:
    """Upstream's cosine and nrmse over the whole of out and state, and the relative rms of the worst head."""
    for a, e, limit in zip(actual, expected, limits, strict=True):
        assert np.isfinite(a).all()
        assert cosine(a, e) >= 0.999
        assert relative_rms(a, e) <= limit
    assert rr_out(case, *(result.out for result in (actual, expected))).rr <= FP16_RMS
    assert rr_state(actual.state, expected.state).rr <= FP16_RMS


def test_upstream_shapes_and_dtypes(backend: str) -> None:
    case = upstream(1, (8, 8), 64, (64, 64))
    out, state = actual = run_cann(case, backend)
    assert (out.shape, out.dtype, state.shape, state.dtype) == ((1, 64, 8, 64), "f2", (1, 8, 64, 64), "f2")
    assert_upstream(case, actual, token_loop(case), (0.02, 0.02))


def test_upstream_optional_g(backend: str) -> None:
    case = upstream(1, (8, 8), 64, (64, 64))
    case = case.but(g=np.zeros_like(case.g))
    zeros, absent = run_cann(case, backend), run_without_g(case, backend)
    assert absent.out.shape == (1, 64, 8, 64)
    assert_upstream(case, absent, token_loop(case), (0.02, 0.02))
    assert_same_bits(absent, zeros)


@pytest.mark.parametrize("scale", [64**-0.5, 1.0])
def test_upstream_beta_zero_without_gate(backend: str, scale: float) -> None:
    case = upstream(1, (8, 8), 64, (64, 64))
    case = case.but(beta=np.zeros_like(case.beta), g=np.zeros_like(case.g), scale=scale)
    out, state = run_without_g(case, backend)
    expected = scale * np.einsum("bthk,hkv->bthv", case.q.astype(np.float64), case.initial_state()[0])
    assert largest_difference(out, expected) < 5e-2
    assert rr_out(case, out, expected).rr <= FP16_RMS
    assert np.array_equal(state, case.initial_state())


def test_upstream_recurrence(backend: str) -> None:
    case = upstream(2, (2, 2), 64, (32, 32))
    assert_upstream(case, run_cann(case, backend), token_loop(case), (0.05, 0.02))


@pytest.mark.slow
def test_upstream_grouped_heads(backend: str) -> None:
    case = upstream(1, (16, 32), 64, (128, 128), zero_state=True)
    assert_upstream(case, run_cann(case, backend), token_loop(case), (0.02, 0.02))


@pytest.mark.slow
def test_upstream_grouped_heads_over_several_chunks_repeat(backend: str) -> None:
    """Upstream allows repeats to differ by 2 %; here all 32 have the first one's bits."""
    case = upstream(1, (16, 32), 512, (128, 128), zero_state=True)
    first = run_cann(case, backend)
    assert_upstream(case, first, token_loop(case), (0.02, 0.02))
    for _ in range(1 if backend == "golden" else 32):
        assert_same_bits(run_cann(case, backend), first)


def widened(case: Case, dk: int) -> Case:
    """The case with Dk padded by zeros; the factor on q stays that of the original width."""
    q, k = (np.pad(x, [(0, 0)] * 3 + [(0, dk - x.shape[-1])]) for x in (case.q, case.k))
    state = np.pad(case.initial_state(), [(0, 0), (0, 0), (0, dk - case.q.shape[-1]), (0, 0)])
    return case.but(q=q, k=k, state=state, scale=case.factor)


@pytest.mark.parametrize("dk", [63, 65, 79, 80, 81, 95, 96, 97, 127])
def test_upstream_non_multiple_reduce_width(backend: str, dk: int) -> None:
    case = upstream(1, (2, 2), 64, (dk, 32))
    actual = run_cann(case, backend)
    assert_upstream(case, actual, token_loop(case), (0.02, 0.02))
    wide = run_cann(widened(case, next(bucket for bucket in (64, 80, 96, 128) if bucket >= dk)), backend)
    narrow = Result(wide.out, wide.state[:, :, :dk])
    assert not wide.state[:, :, dk:].any()
    assert largest_difference(narrow.out, actual.out) < 5e-2
    assert largest_difference(narrow.state, actual.state) < 5e-2
    assert_upstream(case, narrow, actual, (0.02, 0.02))


def test_upstream_self_consistency_over_chunks(backend: str) -> None:
    """The first version's check over chunk sizes, as far as one fixed chunk has it: calls of 64 tokens against one."""
    case = upstream(1, (2, 2), 192, (32, 32))
    whole = run_cann(case, backend)
    pieces, state = [], case.state
    for begin in range(0, 192, 64):
        piece = run_cann(part(case, begin, begin + 64, state), backend)
        pieces.append(piece.out)
        state = piece.state
    joined = Result(np.concatenate(pieces, axis=1), piece.state)
    assert largest_difference(joined.out, whole.out) < 5e-3
    assert largest_difference(joined.state, whole.state) < 5e-3
    assert rr_out(case, joined.out, whole.out).rr <= FP16_RMS
    assert rr_state(joined.state, whole.state).rr <= FP16_RMS
