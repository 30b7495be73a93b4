"""Parts of the gated token loop, one at a time: exp of rows, passes, and how they agree bit by bit."""

import math

import numpy as np
import pytest

from cgdr_numba.core.fast import channel_passes
from cgdr_numba.core.fast.channel_step import exp_in_place
from conftest import COMPILED

F32 = np.float32
SHAPES = [(1, 1), (5, 37), (7, 1), (37, 5), (64, 130), (128, 128), (130, 18)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


def exps(values: np.ndarray) -> np.ndarray:
    x = values.astype(F32)
    with np.errstate(all="ignore"):
        exp_in_place(x)
    return x


def test_exp_is_within_an_ulp(n_examples: int) -> None:
    rng = np.random.default_rng(1)
    n = n_examples // 8
    x = np.concatenate([rng.uniform(-104, 88.7, n), rng.uniform(-1, 1, n), -(10 ** rng.uniform(-9, 2, n))]).astype(F32)
    true = np.exp(x.astype(np.float64))
    assert (np.abs(exps(x) - true) <= np.spacing(true.astype(F32))).all()


def test_exp_at_the_ends_of_float32() -> None:
    x = np.array([0, -0.0, -np.inf, -1e30, -104, 89, 1e30, np.inf, np.nan], F32)
    expected = np.array([1, 1, 0, 0, 0, np.inf, np.inf, np.inf, np.nan], F32)
    np.testing.assert_array_equal(exps(x), expected)
    assert exps(np.array([-103.0]))[0] == F32(math.exp(-103.0)) > 0


class Operands:
    """Random operands of all passes over S [Dk, n]; rows of S lie in a wider array."""

    def __init__(self, dk: int, n: int) -> None:
        self.state = np.pad(random(dk, n), [(0, 0), (0, 3)])[:, :n]
        self.token = random(dk, seed=1), random(n, seed=2)
        self.following = random(dk, seed=3), random(dk, seed=4)
        a, c = np.exp(-np.abs(random(dk, seed=5))), np.exp(-np.abs(random(n, seed=6)))
        self.gates = F32(0.7), a, c
        self.m, self.p = np.full((2, n), np.nan, F32)
        self.out = np.full_like(self.state, np.nan)

    @property
    def decayed(self) -> np.ndarray:
        """S behind all of its gates, in float64."""
        b, a, c = (np.asarray(x, np.float64) for x in self.gates)
        return b * a[:, None] * c * self.state


@pytest.mark.parametrize(("dk", "n"), SHAPES)
def test_passes_against_float64(dk: int, n: int) -> None:
    x = Operands(dk, n)
    limits = {"rtol": 1e-4, "atol": 1e-4}
    channel_passes.look(x.state, x.gates, x.following, x.m, x.p)
    for actual, factors in zip((x.m, x.p), x.following, strict=True):
        np.testing.assert_allclose(actual, x.decayed.T @ factors, **limits)
    channel_passes.take(x.state, x.gates, x.token, x.out)
    np.testing.assert_allclose(x.out, x.decayed + np.outer(*x.token), rtol=1e-5, atol=1e-5)
    channel_passes.decay(x.state, x.gates, x.following, x.out, x.m, x.p)
    np.testing.assert_allclose(x.out, x.decayed, rtol=1e-6)
    np.testing.assert_allclose(x.m, x.decayed.T @ x.following[0], **limits)


@pytest.mark.parametrize(("dk", "n"), SHAPES)
def test_ways_over_a_state_have_the_same_bits(dk: int, n: int) -> None:
    """Looking and then taking; decaying, taking and advancing: what a token computes depends on no way."""
    x, one = Operands(dk, n), F32(1)
    ones = np.ones(n, F32)
    gates, next_gates = (one, x.gates[1], ones), (one, np.ascontiguousarray(x.gates[1][::-1]), ones)
    by_look, by_advance = x.state.copy(), np.full_like(x.state, np.nan)
    sums = np.full((4, n), np.nan, F32)
    channel_passes.look(by_look, gates, x.following, sums[0], sums[1])
    channel_passes.decay(x.state, gates, x.following, by_advance, x.m, x.p)
    assert np.array_equal(sums[:2], [x.m, x.p])
    channel_passes.take(by_look, gates, x.token, by_look)
    channel_passes.look(by_look, next_gates, x.following, sums[2], sums[3])
    channel_passes.advance(by_advance, x.token, next_gates[1], x.following, x.m, x.p)
    assert np.array_equal(sums[2:], [x.m, x.p])
    channel_passes.take(by_look, next_gates, x.token, by_look)
    channel_passes.take(by_advance, (one, np.ones(dk, F32), ones), x.token, by_advance)
    assert np.array_equal(by_look, by_advance)


@pytest.mark.skipif(not COMPILED, reason="plain NumPy sums whole rows")
def test_columns_do_not_depend_on_their_mates() -> None:
    x = Operands(50, 131)
    b, a, c = x.gates
    channel_passes.look(x.state, x.gates, x.following, x.m, x.p)
    for columns in (slice(0, 1), slice(3, 20), slice(60, 131)):
        part = np.full((2, columns.stop - columns.start), np.nan, F32)
        channel_passes.look(x.state[:, columns], (b, a, c[columns]), x.following, part[0], part[1])
        assert np.array_equal(part, np.stack([x.m[columns], x.p[columns]]))
