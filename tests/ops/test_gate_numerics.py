"""Gates at the ends of their range: spans that overflow a factored exponential, -inf, growth, and NaN."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from judge import assert_same_bits, assert_within, assert_within_or_kernel, both_families, run_cann, run_fla, same_bits
from reference import Case, Result, gate_range, make_case, part, relative_rms, rr_out, token_loop


@both_families
@pytest.mark.parametrize("g", [-1.0, -1.3, -1.5, -2.0, -20.0])
def test_t001_decay_that_overflows_when_masked_too_late(backend: str, run: Any, g: float) -> None:
    case = make_case(1, t=64, g=g)
    assert_within(case, run(case, backend), out=1e-5, state=1e-5)


def tiny_decay(dtype: type) -> tuple[Case, Result]:
    """Gates of 1e-12 a token, and what is left of the recurrence from the second token on."""
    beta = np.random.default_rng(2).uniform(0, 1, (1, 64, 1))
    case = make_case(2, t=64, g=-27.631, beta=beta, dtype=np.float64).cast(dtype)
    q, k, v, b = (x[0, :, 0].astype(np.float64) for x in (case.q, case.k, case.v, case.beta[..., None]))
    out = case.factor * b * v * (k * q).sum(-1, keepdims=True)
    state = np.outer(k[-1], b[-1] * v[-1])
    return case, Result(out[None, :, None], state[None, None])


def judge_tiny_decay(case: Case, actual: Result, expected: Result, bound: float) -> None:
    """Everything is finite, and from the second token on nothing of earlier tokens is left."""
    assert np.isfinite(actual.out).all()
    later = [Result(x.out[:, 1:], x.state) for x in (actual, expected)]
    assert_within(part(case, 1, 64, None), later[0], out=bound, state=bound, expected=later[1])


@both_families
def test_t002_decay_that_forgets_everything(backend: str, run: Any) -> None:
    case, expected = tiny_decay(np.float32)
    judge_tiny_decay(case, run(case, backend), expected, 1e-6)


def test_t002_decay_that_forgets_everything_in_float64() -> None:
    case, expected = tiny_decay(np.float64)
    judge_tiny_decay(case, run_fla(case, "golden"), expected, 1e-10)


@pytest.mark.parametrize(
    ("t", "hv", "width"), [(24, 1, 8), pytest.param(256, 2, 64, marks=pytest.mark.slow)], ids=["small", "full"]
)
def test_t004_gates_over_the_span_of_models(backend: str, t: int, hv: int, width: int) -> None:
    case = gate_range(t, hv, width)
    # The kernel takes differences of running float32 sums: after a gate of -316 a small one has lost its last bits.
    assert_within_or_kernel(case, backend, run_fla(case, backend), out=2e-6, state=1e-5)


FORGETTING = {
    "middle": (20, (7,)),
    "first": (20, (0,)),
    "last": (20, (19,)),
    "twice": (20, (5, 11)),
    "chunk-end": (130, (63,)),
    "chunk-begin": (130, (64,)),
    "twice-and-far": (130, (3, 30, 100)),
}


@pytest.mark.parametrize("value", [-np.inf, -1e30], ids=["inf", "1e30"])
@pytest.mark.parametrize("where", FORGETTING)
def test_t005_gate_of_minus_infinity_starts_afresh(backend: str, where: str, value: float) -> None:
    t, tokens = FORGETTING[where]
    case = make_case(5, t=t)
    g = case.g.copy()
    g[:, list(tokens)] = value
    edges = [0, *tokens, t] if tokens[0] else [*tokens, t]
    pieces = []
    for begin, end in pairwise(edges):
        fresh = part(case, begin, end, None if begin in tokens else case.state)
        gates = fresh.g.copy()
        gates[:, 0] = 0 if begin in tokens else gates[:, 0]
        pieces.append(token_loop(fresh.but(g=gates)))
    expected = Result(np.concatenate([piece.out for piece in pieces], axis=1), pieces[-1].state)

    actual = run_fla(case.but(g=g), backend)
    # inf - inf and 1e30 - 1e30 are what the kernel computes behind the gate; its rows before are sound.
    assert_within_or_kernel(case.but(g=g), backend, actual, out=1e-6, state=1e-6, expected=expected)
    before = slice(0, tokens[0])
    assert rr_out(part(case, 0, tokens[0], None), actual.out[:, before], expected.out[:, before]).rr <= 1e-6


def test_t007_gates_that_grow(backend: str) -> None:
    case = make_case(7, t=64, g=0.2)
    expected = token_loop(case)
    assert np.sqrt(np.mean(expected.state**2)) > 1e4
    assert_within(case, run_fla(case, backend), out=2e-5, state=2e-5, expected=expected)


def spoiled(case: Case, name: str) -> tuple[Case, list[int]]:
    """The case with one NaN in head 1 of `name`, at token 50 of row 0; and the value heads that it serves."""
    tensor = getattr(case, name).copy()
    tensor[(0, 50, 1, 3)[: tensor.ndim]] = np.nan
    group = case.v.shape[2] // case.q.shape[2] if name in ("q", "k") else 1
    return case.but(**{name: tensor}), list(range(group, 2 * group))


@both_families
@pytest.mark.parametrize("name", ["g", "beta", "v", "k", "q"])
@pytest.mark.parametrize(
    ("heads", "batch", "t"),
    [((2, 2), 1, 54), pytest.param((2, 4), 2, 100, marks=pytest.mark.slow)],
    ids=["small", "full"],
)
def test_t008_nan_stays_where_it_belongs(
    backend: str, run: Any, name: str, heads: tuple[int, int], batch: int, t: int
) -> None:
    case = make_case(8, t=t, heads=heads, batch=batch)
    dirty_case, own = spoiled(case, name)
    clean, dirty, truth = run(case, backend), run(dirty_case, backend), token_loop(dirty_case)
    assert np.isnan(dirty.out[0, 50, own, 3]).all(), "hidden"
    assert np.isnan(dirty.out[0, t - 1, own, 3]).all() == (name != "q")
    assert np.isfinite(dirty.out[0, :50]).all()
    for tensor, of_clean, of_truth in zip(dirty, clean, truth, strict=True):
        nan = np.isnan(of_truth)
        np.testing.assert_array_equal(np.isnan(tensor), nan)
        assert relative_rms(tensor[~nan], of_truth[~nan]) <= 1e-5
        if backend in ("golden", "faithful"):
            assert same_bits(tensor[~nan], of_clean[~nan])
    others = [h for h in range(heads[1]) if h not in own]
    assert same_bits(dirty.out[:, :, others], clean.out[:, :, others])
    assert same_bits(dirty.state[:, others], clean.state[:, others])
    assert_same_bits(Result(dirty.out[1:], dirty.state[1:]), Result(clean.out[1:], clean.state[1:]))


def test_t008_nan_of_one_sequence_stays_out_of_the_next(backend: str) -> None:
    """Rows of another chunk or sequence keep their bits; on fast, those of the NaN's own chunk change their path."""
    case = make_case(8, t=90, heads=(1, 1), cu=(0, 40, 70, 90))
    g = case.g.copy()
    g[0, 45] = np.nan
    for run in (run_fla, run_cann):
        clean, dirty = run(case, backend), run(case.but(g=g), backend)
        own = slice(40, 45) if backend == "fast" else slice(45, 45)
        keep = np.r_[0 : own.start, 70:90]
        assert same_bits(dirty.out[:, keep], clean.out[:, keep])
        assert relative_rms(dirty.out[:, own], clean.out[:, own]) <= 1e-6
        assert np.isnan(dirty.out[:, 45:70]).all()
        assert same_bits(dirty.state[[0, 2]], clean.state[[0, 2]])
        assert np.isnan(dirty.state[1]).all()
