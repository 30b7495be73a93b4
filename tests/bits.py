"""Calls of the CANN family whose results are compared bit by bit: with the kernel's emulation, or with one another."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import chunk_gated_delta_rule, npu_chunk_gated_delta_rule
from cgdr_numba.core.dims import Dims
from emulation import emulate_chunk
from judge import same_bits
from reference import Array, Result

TENSORS = ("query", "key", "value", "g", "beta", "initial_state")
OPTION_PAIRS = [
    {"axpy": axpy, "overflow": overflow} for axpy, overflow in product(("two-roundings", "fused"), ("ieee", "saturate"))
]
"""Both answers to both open questions about the vector unit."""
OPTION_IDS = ["-".join(pair.values()) for pair in OPTION_PAIRS]
INPUT_DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
"""What faithful takes as q, k and v."""
every_option = pytest.mark.parametrize("options", OPTION_PAIRS, ids=OPTION_IDS)


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of npu_chunk_gated_delta_rule."""

    query: Array
    """[T, Hk, Dk]"""
    key: Array
    """[T, Hk, Dk]"""
    value: Array
    """[T, Hv, Dv]"""
    g: Array | None
    """[T, Hv]"""
    beta: Array
    """[T, Hv]"""
    initial_state: Array
    """[N, Hv, Dv, Dk]"""
    lengths: tuple[int, ...]
    scale: float

    def but(self, **changes: Any) -> "Call":
        """The same call with some arguments exchanged."""
        return replace(self, **changes)

    @property
    def dims(self) -> Dims:
        """Its sizes, as plans take them."""
        (n_tokens, hk, dk), (hv, dv) = self.query.shape, self.value.shape[1:]
        return Dims(n_tokens, len(self.lengths), hk, hv, dk, dv)


def make_call(
    seed: int,
    lengths: tuple[int, ...],
    *,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: Any = np.float32,
    state: Any = np.float32,
    g: float | None = None,
) -> Call:
    """Random inputs: q and k of length 1 about, normal v and state, g = -softplus(N) unless given.

    `heads` is (Hk, Hv), `dims` (Dk, Dv). g is float32, the state of its own dtype, everything else of `dtype`. Results
    in float32 hide no difference behind a last rounding, so that is what comes where nothing is said.
    """
    rng = np.random.default_rng([seed, *lengths, *heads, *dims])
    (hk, hv), (dk, dv), t = heads, dims, sum(lengths)
    q, k = rng.standard_normal((2, t, hk, dk)) / np.sqrt(dk)
    v, s0 = rng.standard_normal((t, hv, dv)), rng.standard_normal((len(lengths), hv, dv, dk))
    gates = rng.standard_normal((2, t, hv))
    decay = -np.log1p(np.exp(gates[0])) if g is None else np.full((t, hv), g)
    beta = 1 / (1 + np.exp(-gates[1]))
    q, k, v, beta = (x.astype(dtype) for x in (q, k, v, beta))
    return Call(q, k, v, decay.astype(np.float32), beta, s0.astype(state), lengths, dk**-0.5)


def faithful(call: Call, **options: Any) -> Result:
    """Out and final state of the faithful backend."""
    tensors = {name: getattr(call, name) for name in TENSORS}
    return Result(*npu_chunk_gated_delta_rule(**tensors, actual_seq_lengths=call.lengths, scale=call.scale, **options))


def faithful_fla(call: Call, **options: Any) -> Result:
    """The call through the fla family, states V first."""
    tensors = (call.query, call.key, call.value, call.g, call.beta)
    out, state = chunk_gated_delta_rule(
        *(None if x is None else x[None] for x in tensors),
        backend="faithful",
        scale=call.scale,
        initial_state=call.initial_state,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=np.cumsum([0, *call.lengths]),
        **options,
    )
    return Result(out[0], state)


def emulated(call: Call, axpy: str = "two-roundings", overflow: str = "ieee") -> Result:
    """Out and final state of the kernel's emulation."""
    tensors = {name: getattr(call, name) for name in TENSORS}
    return Result(*emulate_chunk(**tensors, lengths=call.lengths, scale=call.scale, axpy=axpy, overflow=overflow))


def difference(actual: Result, expected: Result) -> str:
    """Where two results first differ in a bit, in words; nothing where they do not. Any NaN equals any NaN."""
    for name, a, e in zip(Result._fields, actual, expected, strict=True):
        if (a.shape, a.dtype) != (e.shape, e.dtype):
            return f"{name}: {a.dtype} {a.shape} instead of {e.dtype} {e.shape}"
        if not same_bits(a, e):
            words = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (a, e)]
            wrong = (words[0] != words[1]) & ~(np.isnan(a) & np.isnan(e))
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"{name}: {wrong.sum()} of {a.size} elements differ, first {at}: {a[at]!r} instead of {e[at]!r}"
    return ""


def assert_same(actual: Result, expected: Result) -> None:
    """No bit differs."""
    found = difference(actual, expected)
    assert not found, found


def assert_emulated(call: Call, axpy: str = "two-roundings", overflow: str = "ieee", **options: Any) -> Result:
    """Faithful has the emulation's bits; gives them."""
    expected = emulated(call, axpy, overflow)
    found = difference(faithful(call, axpy=axpy, overflow=overflow, **options), expected)
    assert not found, found
    return expected


def poked(call: Call, value: float) -> Call:
    """The call with `value` once in every tensor but g: each in a head, token and column of its own."""
    tensors = {}
    for i, name in enumerate(("query", "key", "value", "beta", "initial_state")):
        tensors[name] = getattr(call, name).copy()
        size = tensors[name].size
        tensors[name].flat[(i * size // 5 + 3) % size] = value
    return call.but(**tensors)


def permuted(x: np.ndarray) -> np.ndarray:
    """Heads before tokens in memory."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def backwards(x: np.ndarray) -> np.ndarray:
    """Every axis with a negative step."""
    flip = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[flip])[flip]


def spaced(x: np.ndarray) -> np.ndarray:
    """Every third element of a page of NaN, on every axis."""
    page = np.full([3 * n for n in x.shape], np.nan, x.dtype)
    page[(slice(1, None, 3),) * x.ndim] = x
    return page[(slice(1, None, 3),) * x.ndim]


def unaligned(x: np.ndarray) -> np.ndarray:
    """At an odd address, in memory that cannot be written."""
    moved = np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)
    assert moved.ctypes.data % 2 or x.size == 0
    return moved


def unaligned_backwards(x: np.ndarray) -> np.ndarray:
    """At an odd address, with negative steps and writable."""
    flip = (slice(None, None, -1),) * x.ndim
    page = np.frombuffer(bytearray(x.nbytes + 1), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    page[...] = x[flip]
    return page[flip]


def read_only(x: np.ndarray) -> np.ndarray:
    """Not to be written."""
    view = x.copy()
    view.flags.writeable = False
    return view


class Inert(np.ndarray):
    """A subclass that refuses to compute: the package is to see the plain array in it."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Refuse every ufunc."""
        raise AssertionError(f"{ufunc.__name__} of a subclass was used")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Refuse every other function of NumPy."""
        raise AssertionError(f"{function.__name__} of a subclass was used")


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Fortran": np.asfortranarray,
    "permuted": permuted,
    "last axis first": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1),
    "backwards": backwards,
    "spaced": spaced,
    "unaligned": unaligned,
    "unaligned backwards": unaligned_backwards,
    "read-only": read_only,
    "subclass": lambda x: x.view(Inert),
}
"""Ways to keep the same numbers in memory."""


def sampled() -> dict[str, Result]:
    """Results that do not depend on how kernels are run: small calls of every kind, each with all options."""
    calls = {
        "float16": make_call(31, (5, 0, 2), dims=(16, 20), dtype=np.float16),
        "float32": make_call(31, (4,), heads=(1, 1), dims=(65, 20)),
        "float64": make_call(31, (4,), dims=(5, 3), state=np.float64),
        "chunks": make_call(31, (67,), heads=(1, 1), dims=(3, 2)),
        "gates": make_call(31, (6,), heads=(1, 1), dims=(8, 8), g=-33.0),
        "infinite": poked(make_call(31, (5,), dims=(8, 8)), np.inf),
        "nan": poked(make_call(31, (5,), dims=(8, 8), dtype=np.float16), np.nan),
    }
    return {
        f"{name}, {option}": faithful(call, **pair)
        for name, call in calls.items()
        for option, pair in zip(OPTION_IDS, OPTION_PAIRS, strict=True)
    }


def save_sampled(path: str) -> None:
    """Write the sampled results to an npz file."""
    arrays = {
        f"{name}, {field}": getattr(result, field) for name, result in sampled().items() for field in Result._fields
    }
    np.savez(path, **arrays)
