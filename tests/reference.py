"""The Gated Delta Rule as a float64 token loop, how far results are from it, and inputs that tests share.

Written from the recurrence alone; nothing here comes from the package under test. Shapes are those of the fla family:
q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; g, beta [B, T, Hv]; states [N, Hv, Dk, Dv].
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
L2NORM_EPS = 1e-6


class Result(NamedTuple):
    """What an operator call gives."""

    out: Array
    """[B, T, Hv, Dv]"""
    state: Array
    """Final state [N, Hv, Dk, Dv]."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the operator; tensors of one dtype or of several."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    state: Array | None = None
    """[N, Hv, Dk, Dv]; None stands for zeros."""
    scale: float | None = None
    """None stands for Dk^-0.5."""
    cu: Any = None
    """Running sums of lengths [N + 1]; None makes every batch row a sequence."""
    l2norm: bool = False
    """Whether q and k are normalised by the operator."""

    def but(self, **changes: Any) -> "Case":
        """The same call with some fields exchanged."""
        return replace(self, **changes)

    def cast(self, dtype: Any) -> "Case":
        """The same call with every tensor in `dtype`."""
        tensors = ("q", "k", "v", "g", "beta", "state")
        return self.but(**{name: x.astype(dtype) for name in tensors if (x := getattr(self, name)) is not None})

    @property
    def factor(self) -> float:
        """The number that stands for `scale`."""
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [end - begin for _, begin, end in self.sequences()]

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Batch row, first token and end of each sequence."""
        if self.cu is None:
            yield from ((row, 0, self.q.shape[1]) for row in range(self.q.shape[0]))
        else:
            sums = [int(x) for x in self.cu]
            yield from ((0, begin, end) for begin, end in pairwise(sums))

    def initial_state(self) -> Array:
        """The initial state as given, or zeros in float32."""
        if self.state is not None:
            return self.state
        n = len(list(self.sequences()))
        return np.zeros((n, self.v.shape[2], self.q.shape[3], self.v.shape[3]), np.float32)


def normalised(x: Array) -> Array:
    """X / sqrt(sum x^2 + 1e-6) over the last axis, in float64."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).sum(-1, keepdims=True) + L2NORM_EPS)


@np.errstate(all="ignore")
def token_loop(case: Case) -> Result:
    """The truth: S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q, all in float64."""
    key_head = np.arange(case.v.shape[2]) // (case.v.shape[2] // case.q.shape[2])
    q, k = (normalised(x) if case.l2norm else x.astype(np.float64) for x in (case.q, case.k))
    v, g, beta = (x.astype(np.float64) for x in (case.v, case.g, case.beta))
    out = np.zeros(v.shape)
    final = case.initial_state().astype(np.float64)
    for n, (row, begin, end) in enumerate(case.sequences()):
        s = final[n]
        for t in range(begin, end):
            kt, qt = k[row, t, key_head], q[row, t, key_head]
            s = np.exp(g[row, t])[:, None, None] * s
            u = beta[row, t][:, None] * (v[row, t] - np.einsum("hkv,hk->hv", s, kt))
            s = s + kt[:, :, None] * u[:, None, :]
            out[row, t] = case.factor * np.einsum("hkv,hk->hv", s, qt)
        final[n] = s
    return Result(out, final)


def part(case: Case, begin: int, end: int, state: Array | None) -> Case:
    """Tokens [begin, end) of every batch row, from another initial state."""
    tensors = {name: getattr(case, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
    return case.but(**tensors, state=state)


class Worst(NamedTuple):
    """The largest relative rms error, and where it is."""

    rr: float
    sequence: int
    head: int


def relative_rms(actual: Array, expected: Array) -> float:
    """rms(actual - expected) / rms(expected); inf where either is not finite, or zeros are missed."""
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    assert a.shape == e.shape
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return np.inf
    error, size = np.sqrt(np.sum((a - e) ** 2)), np.sqrt(np.sum(e**2))
    if error == 0:
        return 0.0
    return float(error / size) if size > 0 else np.inf


def _worst(blocks: Iterator[tuple[int, int, Array, Array]]) -> Worst:
    """The worst of (sequence, head, actual, expected); nothing to compare gives 0."""
    return max((Worst(relative_rms(a, e), n, h) for n, h, a, e in blocks), default=Worst(0.0, -1, -1))


def rr_out(case: Case, actual: Array, expected: Array) -> Worst:
    """The worst (sequence, head) of an output."""
    heads = range(case.v.shape[2])
    return _worst(
        (n, h, actual[row, begin:end, h], expected[row, begin:end, h])
        for n, (row, begin, end) in enumerate(case.sequences())
        for h in heads
        if end > begin
    )


def rr_state(actual: Array, expected: Array) -> Worst:
    """The worst (sequence, head) of a final state."""
    assert actual.shape == expected.shape
    return _worst((n, h, actual[n, h], expected[n, h]) for n in range(len(actual)) for h in range(actual.shape[1]))


def unit(rng: np.random.Generator, *shape: int) -> Array:
    """Random directions of length 1 over the last axis, float64."""
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_case(
    seed: int,
    *,
    t: int,
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (16, 16),
    batch: int = 1,
    g: Any = None,
    beta: Any = None,
    state: bool = True,
    cu: Any = None,
    dtype: Any = np.float32,
) -> Case:
    """Random inputs: unit q and k, normal v and state, g = -softplus(N), beta = sigmoid(N).

    `heads` is (Hk, Hv), `dims` (Dk, Dv). Numbers or arrays for g and beta are broadcast to [B, T, Hv].
    """
    rng = np.random.default_rng(seed)
    (hk, hv), (dk, dv) = heads, dims
    q, k = unit(rng, batch, t, hk, dk), unit(rng, batch, t, hk, dk)
    v = rng.standard_normal((batch, t, hv, dv))
    gates = rng.standard_normal((2, batch, t, hv))
    n_sequences = batch if cu is None else len(cu) - 1
    s0 = rng.standard_normal((n_sequences, hv, dk, dv)) if state else None
    g_full = -np.log1p(np.exp(gates[0])) if g is None else np.broadcast_to(np.asarray(g, np.float64), gates[0].shape)
    b_full = 1 / (1 + np.exp(-gates[1])) if beta is None else np.broadcast_to(np.asarray(beta), gates[1].shape)
    return Case(q, k, v, g_full, b_full, s0, cu=cu).cast(dtype)


def gate_range(t: int, hv: int, width: int, seed: int = 4) -> Case:
    """Gates over the span that models show: g = -exp(U(ln 1e-4, ln 316)), v in -0.278 .. 24.78."""
    rng = np.random.default_rng([seed, t])
    g = -np.exp(rng.uniform(np.log(1e-4), np.log(316), (1, t, hv)))
    case = make_case(seed, t=t, heads=(1, hv), dims=(width, width), g=g, beta=rng.uniform(0, 1, (1, t, hv)))
    return case.but(v=rng.uniform(-0.278, 24.78, case.v.shape).astype(np.float32))


def same_key(t: int) -> Case:
    """One token's key again and again, written in full and never forgotten."""
    case = make_case(29, t=t, g=0.0, beta=1.0)
    return case.but(k=np.broadcast_to(case.k[:, :1], case.k.shape).copy())


def near_same_key(t: int) -> Case:
    """Keys within a thousandth of one direction."""
    case = make_case(31, t=t, dims=(32, 32), g=-1e-4, beta=0.999)
    k = 1e-3 * np.random.default_rng(310).standard_normal(case.k.shape)
    k[..., 0] += 1
    return case.but(k=(k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(np.float32))


def periodic_keys(t: int = 64, width: int = 32) -> Case:
    """Four keys in turn."""
    case = make_case(32, t=t, dims=(width, width), g=-1e-3, beta=0.98)
    return case.but(k=case.k[:, np.arange(t) % 4])


def random_case(seed: int, most_tokens: int = 200, most_width: int = 160) -> Case:
    """A random shape: T, Hk 1 .. 4, Hv a multiple, Dk and Dv, with a state or without; q and k of length 1."""
    rng = np.random.default_rng([34, seed])
    t, hk = int(rng.integers(1, most_tokens + 1)), int(rng.integers(1, 5))
    hv = hk * int(rng.choice([1, 2, 3, 4, 8]))
    dk, dv = (int(x) for x in rng.integers(1, most_width + 1, 2))
    return make_case(seed, t=t, heads=(hk, hv), dims=(dk, dv), state=bool(rng.integers(2)), dtype=np.float64)
