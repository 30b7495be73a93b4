"""Calls over a pool of states: their inputs, the float64 token loop over them, and results that are judged by it.

The loop is written from the recurrence alone; nothing of it comes from the package under test.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import npu_recurrent_gated_delta_rule
from cgdr_numba.core.dims import Dims
from reference import Array, relative_rms, unit

BACKENDS = ("golden", "faithful", "fast")
"""Backends that every test of the operator runs on."""
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]
"""Dtypes that every backend takes, of tensors and of pools."""
every_backend = pytest.mark.parametrize("backend", BACKENDS)


class PoolResult(NamedTuple):
    """What a call leaves behind."""

    out: Array
    """[T, Hv, Dv]"""
    pool: Array
    """[slots, Hv, Dv, Dk]"""


@dataclass(frozen=True, eq=False)
class PoolCase:
    """Arguments of npu_recurrent_gated_delta_rule."""

    query: Array
    key: Array
    value: Array
    state: Array
    """The pool before the call; calls run on copies."""
    beta: Array
    lengths: tuple[int, ...]
    slots: Any
    accepted: Any = None
    g: Array | None = None
    gk: Array | None = None
    scale: float | None = None
    read: Any = None

    def but(self, **changes: Any) -> "PoolCase":
        """The same call with some arguments exchanged."""
        return replace(self, **changes)

    def cast(self, dtype: Any, state: Any = None) -> "PoolCase":
        """The same call with q, k, v and beta in `dtype`, and the pool in `state` or in `dtype` as well."""
        tensors = {name: getattr(self, name).astype(dtype) for name in ("query", "key", "value", "beta")}
        return self.but(**tensors, state=self.state.astype(state or dtype))

    @property
    def dims(self) -> Dims:
        """Its sizes, as plans take them."""
        (n_tokens, hk, dk), (hv, dv) = self.query.shape, self.value.shape[1:]
        return Dims(n_tokens, len(self.lengths), hk, hv, dk, dv)

    def arguments(self) -> dict[str, Any]:
        """All arguments by name, but the pool."""
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "beta": self.beta,
            "scale": self.scale,
            "actual_seq_lengths": self.lengths,
            "ssm_state_indices": self.slots,
            "num_accepted_tokens": self.accepted,
            "g": self.g,
            "gk": self.gk,
            "read_indices": self.read,
        }


def run(case: PoolCase, backend: str, pool: Array | None = None, **options: Any) -> PoolResult:
    """The case on a backend, over a copy of its pool or over `pool`."""
    pool = case.state.copy() if pool is None else pool
    out = npu_recurrent_gated_delta_rule(**{**case.arguments(), **options}, state=pool, backend=backend)
    return PoolResult(out, pool)


@np.errstate(all="ignore")
def pool_loop(case: PoolCase) -> PoolResult:
    """The truth, unrounded: S <- e^g S diag(e^gk); S <- S + beta (v - S k) k^T; o = scale S q; S to its slot."""
    n_heads, n_tokens = case.value.shape[1], len(case.value)
    key_head = np.arange(n_heads) // (n_heads // case.query.shape[1])
    q, k, v, beta = (x.astype(np.float64) for x in (case.query, case.key, case.value, case.beta))
    before = case.state.astype(np.float64)
    out, pool = np.zeros(v.shape), before.copy()
    decay = np.ones((n_tokens, n_heads, 1))
    if case.g is not None:
        decay = decay * np.exp(case.g.astype(np.float64))[..., None]
    if case.gk is not None and (case.g is None or case.gk.ndim == 3):
        decay = decay * np.exp(case.gk.astype(np.float64)).reshape(n_tokens, n_heads, -1)
    stop = 0
    for n, length in enumerate(case.lengths):
        start, stop = stop, stop + length
        if length == 0 or case.slots[start] < 0:
            continue
        read = case.slots[start + (0 if case.accepted is None else case.accepted[n] - 1)]
        s = before[read if case.read is None else case.read[n]]
        for t in range(start, stop):
            s = s * decay[t][:, None, :]
            error = v[t] - np.einsum("hvk,hk->hv", s, k[t, key_head])
            s = s + (beta[t][:, None] * error)[..., None] * k[t, key_head][:, None, :]
            out[t] = (1.0 if case.scale is None else case.scale) * np.einsum("hvk,hk->hv", s, q[t, key_head])
            pool[case.slots[t]] = s
    return PoolResult(out, pool)


def make_pool_case(
    seed: int,
    lengths: tuple[int, ...],
    *,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 16),
    gates: str = "g",
    accepted: bool = False,
    n_slots: int | None = None,
    dtype: Any = np.float32,
    state: Any = None,
) -> PoolCase:
    """Random inputs: q and k of length 1, normal v and states, beta = sigmoid(N), slots of a random permutation.

    `heads` is (Hk, Hv), `dims` (Dk, Dv). `gates` says which gates there are: any of "g", "scalar" and "vector", with
    spaces between. Gates are float32, everything else of `dtype`, the pool of `state` where that is given.
    """
    rng = np.random.default_rng([seed, *lengths, *heads, *dims])
    (hk, hv), (dk, dv), t = heads, dims, sum(lengths)
    n_slots = t + 3 if n_slots is None else n_slots
    values = {
        "query": unit(rng, t, hk, dk),
        "key": unit(rng, t, hk, dk),
        "value": rng.standard_normal((t, hv, dv)),
        "state": rng.standard_normal((n_slots, hv, dv, dk)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal((t, hv)))),
    }
    log_decays = -np.log1p(np.exp(rng.standard_normal((2, t, hv, dk)))).astype(np.float32)
    slots = rng.permutation(n_slots)[:t]
    counts = [int(rng.integers(1, length + 1)) if length else 0 for length in lengths]
    wanted = gates.split()
    gk = log_decays[1] if "vector" in wanted else np.ascontiguousarray(log_decays[1, ..., 0])
    case = PoolCase(
        **values,
        lengths=lengths,
        slots=slots,
        accepted=counts if accepted else None,
        g=np.ascontiguousarray(log_decays[0, ..., 0]) if "g" in wanted else None,
        gk=gk if "vector" in wanted or "scalar" in wanted else None,
        scale=dk**-0.5,
    )
    return case.cast(dtype, state)


def tokens(case: PoolCase, chosen: list[int], lengths: tuple[int, ...]) -> PoolCase:
    """Some tokens of a case alone."""
    names = ("query", "key", "value", "beta", "g", "gk")
    picked = {name: x[chosen] for name in names if (x := getattr(case, name)) is not None}
    return case.but(**picked, slots=np.asarray(case.slots)[chosen], lengths=lengths)


def written(case: PoolCase) -> list[int]:
    """Slots that the call writes."""
    return sorted({int(slot) for slot in case.slots if slot >= 0})


def assert_right(case: PoolCase, actual: PoolResult, bound: float, pool_bound: float | None = None) -> None:
    """Every (token, head) and written (slot, head) keeps the bound of relative rms, other slots every bit."""
    truth = pool_loop(case)
    for t in range(len(truth.out)):
        for h in range(truth.out.shape[1]):
            rr = relative_rms(actual.out[t, h], truth.out[t, h])
            assert rr <= bound, f"out: relative rms {rr:.3g} > {bound:g} at token {t}, head {h}"
    for slot in written(case):
        for h in range(truth.pool.shape[1]):
            rr = relative_rms(actual.pool[slot, h], truth.pool[slot, h])
            limit = bound if pool_bound is None else pool_bound
            assert rr <= limit, f"pool: relative rms {rr:.3g} > {limit:g} in slot {slot}, head {h}"
    untouched = np.setdiff1d(np.arange(len(case.state)), written(case))
    assert actual.pool[untouched].tobytes() == case.state[untouched].tobytes(), "a slot that no token names has changed"


def same(actual: PoolResult, expected: PoolResult) -> None:
    """No bit of out or pool differs."""
    for name, a, e in zip(PoolResult._fields, actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape), name
        words = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (a, e)]
        wrong = (words[0] != words[1]) & ~(np.isnan(a) & np.isnan(e))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{name}: {wrong.sum()} of {a.size} differ, first {at}: {a[at]!r} instead of {e[at]!r}"
            )
