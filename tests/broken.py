"""Broken arguments, one to three at a time: always the contract's own errors, and no trace of them afterwards."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cgdr_numba import (
    DeviceSpec,
    chunk_gated_delta_rule,
    npu_chunk_gated_delta_rule,
    plan_chunk,
)
from cgdr_numba.core.dims import Dims
from cgdr_numba.sched.host_plan import plan_host

T, HK, HV, DK, DV = 7, 2, 4, 3, 6
DIMS = Dims(T, 2, HK, HV, DK, DV)
Rng = np.random.Generator
Arguments = dict[str, Any]


class Family(NamedTuple):
    """One of the public functions and how it calls its tensors and lengths."""

    function: Callable[..., Any]
    tensors: tuple[str, str, str, str, str, str]
    lengths: str


FAMILIES = {
    "fla": Family(chunk_gated_delta_rule, ("q", "k", "v", "g", "beta", "initial_state"), "cu_seqlens"),
    "cann": Family(
        npu_chunk_gated_delta_rule, ("query", "key", "value", "g", "beta", "initial_state"), "actual_seq_lengths"
    ),
}


class Break(NamedTuple):
    """One broken argument (or a pair that excludes one another)."""

    changes: Arguments
    """Arguments to exchange; MISSING leaves one out."""
    came: str
    """What came, in the words that the message has to hold; empty where they are not foreseen."""
    parties: tuple[str, ...] = ()
    """Arguments beside the changed ones that the message may blame: those that must agree with them."""


MISSING = object()
GATE_SWITCHES = ["use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"]
Breaker = Callable[[Family, Arguments, Rng], Break]


def sound(family: Family, backend: str) -> Arguments:
    """Arguments that break nothing."""
    rng = np.random.default_rng(0)
    shapes = [(T, HK, DK), (T, HK, DK), (T, HV, DV), (T, HV), (T, HV), (2, HV, DV, DK)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    lengths: Any = [3, 4]
    if family.lengths == "cu_seqlens":
        arrays = [x[None] for x in arrays[:5]] + [arrays[5].swapaxes(2, 3)]
        lengths = [0, 3, 7]
    return {**dict(zip(family.tensors, arrays, strict=True)), family.lengths: lengths, "backend": backend}


def pick(rng: Rng, options: list[Any]) -> Any:
    """One of the options, as it is."""
    return options[int(rng.integers(len(options)))]


# Tensors


def a_tensor(family: Family, call: Arguments, rng: Rng) -> tuple[str, np.ndarray]:
    """Name and value of some tensor."""
    name = pick(rng, list(family.tensors))
    return name, call[name]


def wrong_type(family: Family, call: Arguments, rng: Rng) -> Break:
    name, x = a_tensor(family, call, rng)
    others = [x.tolist(), memoryview(x), 1.0, "x", x.flat[0], object(), (x,)]
    if name in (*family.tensors[:3], *(("beta", "initial_state") if family.lengths != "cu_seqlens" else ())):
        others.append(None)
    value = pick(rng, others)
    kind = type(value)
    return Break({name: value}, f"{kind.__module__}.{kind.__qualname__}")


def masked(family: Family, call: Arguments, rng: Rng) -> Break:
    name, x = a_tensor(family, call, rng)
    return Break({name: np.ma.masked_array(x)}, "a MaskedArray")


def byte_order(family: Family, call: Arguments, rng: Rng) -> Break:
    name, x = a_tensor(family, call, rng)
    dtype = np.dtype(pick(rng, [np.float16, np.float32, np.float64])).newbyteorder()
    return Break({name: x.astype(dtype)}, dtype.str)


def no_float(family: Family, call: Arguments, rng: Rng) -> Break:
    name, x = a_tensor(family, call, rng)
    dtype = pick(
        rng, [np.int8, np.uint16, np.int64, bool, np.complex64, np.longdouble, object, "U3", "S2", "m8[s]",
              ml_dtypes.float8_e5m2, ml_dtypes.int4, [("a", "f4"), ("b", "f4")]],
    )  # fmt: skip
    value = np.zeros(x.shape, dtype)
    return Break({name: value}, str(value.dtype))


def other_dtype(family: Family, call: Arguments, rng: Rng) -> Break:
    """K or v of another float dtype than q."""
    name = pick(rng, list(family.tensors[1:3]))
    dtype = np.dtype(pick(rng, [np.float16, ml_dtypes.bfloat16, np.float64]))
    return Break({name: call[name].astype(dtype)}, dtype.name, (family.tensors[0],))


def another_rank(family: Family, call: Arguments, rng: Rng) -> Break:
    name, x = a_tensor(family, call, rng)
    value = pick(rng, [x[None], x[..., None], x[0], x.ravel(), np.array(x.flat[0])])
    return Break({name: value}, f"{value.ndim} axes: {list(value.shape)}")


def another_shape(family: Family, call: Arguments, rng: Rng) -> Break:
    """One axis of another size: nothing, or a size that no other tensor has."""
    name, x = a_tensor(family, call, rng)
    size = int(pick(rng, [0, *range(11, 99)]))
    shape = list(x.shape)
    shape[int(rng.integers(x.ndim))] = size
    blamed = family.tensors if name in family.tensors[:3] else ()
    return Break({name: np.zeros(shape, x.dtype)}, str(size), (*blamed, family.lengths))


def heads_that_do_not_divide(family: Family, call: Arguments, rng: Rng) -> Break:
    name = family.tensors[2]
    n = int(pick(rng, [0, 1, 3, 5, 7]))
    value = np.zeros((*call[name].shape[:-2], n, DV), np.float32)
    return Break({name: value}, f"Hv = {n}", (family.tensors[0],))


def turned_state(family: Family, call: Arguments, rng: Rng) -> Break:
    value = call["initial_state"].swapaxes(2, 3)
    return Break({"initial_state": value}, str(list(value.shape)))


# Lengths


def lengths(family: Family, call: Arguments, rng: Rng) -> Break:
    """Integers that are no lengths of these tokens."""
    good = np.array(call[family.lengths])
    faults = [
        good[::-1] - 1, good + 1, good[:1], np.append(good, 5), np.append(good, -5), 0 * good, -good, good[:0],
        np.array([2**62, 2**62, 2**62, 2**62 - 1]), np.array([-(2**63), 2**63 - 1]),
    ]  # fmt: skip
    fault = pick(rng, faults)
    value = pick(rng, [fault, fault.tolist(), tuple(fault.tolist())])
    return Break({family.lengths: value}, str(fault.tolist()))


def another_number_of_sequences(family: Family, call: Arguments, rng: Rng) -> Break:
    """Sound lengths, but not of as many sequences as there are states."""
    good = list(call[family.lengths])
    value = [*good, good[-1]] if family.lengths == "cu_seqlens" else [*good, 0]
    return Break({family.lengths: value}, str(list(call["initial_state"].shape)), ("initial_state",))


def no_lengths(family: Family, call: Arguments, rng: Rng) -> Break:
    """Something else than a vector of integers."""
    good = call[family.lengths]
    value, came = pick(
        rng,
        [
            (np.array(good, np.float32), "float32"),
            ([float(x) for x in good], f"got {float(good[0])!r}"),
            ([str(x) for x in good], f"got '{good[0]}'"),
            (np.array(good, ">i4"), ">i4"),
            (np.array(good, "m8[s]"), "timedelta64[s]"),
            (np.array(good, object), "object"),
            ([*good, None], "got None"),
            ([Fraction(x) for x in good], f"got {Fraction(good[0])!r}"),
            ([True, False], "got True"),
            (np.ma.masked_array(good), "a MaskedArray"),
            (np.array([good]), f"2 axes: [1, {len(good)}]"),
            ([[x] for x in good], f"got [{good[0]}]"),
            (np.array(T), "0 axes: []"),
            (T, "builtins.int"),
            ("34", "builtins.str"),
            ({3, 4}, "builtins.set"),
            (iter(good), "builtins.list_iterator"),
            (np.array([2**64 - 1], np.uint64), str(2**64 - 1)),
            ([good, 7], f"got {good}"),
            ([2**70, 1], str(2**70)),
        ],
    )
    return Break({family.lengths: value}, came)


# Switches and options


def scale(family: Family, call: Arguments, rng: Rng) -> Break:
    value = pick(rng, ["1", b"1", True, np.True_, 1j, np.complex64(1), [1.0], np.ones(1), np.array(1.0), {}, 10**400])
    return Break({"scale": value}, "an integer beyond it" if type(value) is int else repr(value))


def flag(family: Family, call: Arguments, rng: Rng) -> Break:
    name = pick(rng, ["output_final_state", "use_qk_l2norm_in_kernel", "state_v_first", *GATE_SWITCHES])
    value = pick(rng, [0, 1, None, "True", 1.0, np.int64(1), np.array(True), np.array([True, False]), []])
    return Break({name: value}, repr(value))


def gate_options(family: Family, call: Arguments, rng: Rng) -> Break:
    """Options of the gates that lack what they need, or what they need in another shape or dtype."""
    weight, on = np.zeros(HV, np.float32), {"use_gate_in_kernel": True}
    changes, came, parties = pick(
        rng,
        [
            (on, "got None", ("A_log",)),
            ({**on, "g": None, "A_log": weight}, "got None", ()),
            ({"use_beta_sigmoid_in_kernel": True, "beta": None}, "got None", ()),
            ({"allow_neg_eigval": True}, "got True", ()),
            ({"A_log": weight}, f"[{HV}]", ()),
            ({"dt_bias": [0.0]}, "list", ()),
            ({**on, "A_log": weight[:3]}, "[3]", ()),
            ({**on, "A_log": weight[None]}, f"[1, {HV}]", ()),
            ({**on, "A_log": weight.astype(int)}, "int64", ()),
            ({**on, "A_log": weight, "dt_bias": weight.tolist()}, "builtins.list", ()),
            ({**on, "A_log": weight, "dt_bias": weight.astype(">f4")}, ">f4", ()),
        ],
    )
    return Break(changes, came, parties)


def choice(family: Family, call: Arguments, rng: Rng) -> Break:
    name = pick(rng, ["backend", "axpy", "overflow"])
    value = pick(
        rng, ["", "Golden", "fuse", b"ieee", None, 0, True, ["faithful"], np.array(["fused", "x"]), DeviceSpec]
    )
    return Break({name: value}, repr(value))


def target(family: Family, call: Arguments, rng: Rng) -> Break:
    value = pick(rng, ["", "310P", "910b", "cpu", b"host", 8, ["host"], {"name": "host"}, np.array(["host", "310p"])])
    return Break({"target": value}, repr(value), ("backend",))


def small_device(family: Family, call: Arguments, rng: Rng) -> Break:
    """A device that no tile fits; golden has no use for any device, and fast makes do with every one."""
    if call["backend"] == "fast":
        return no_device(rng)
    n_bytes = int(rng.integers(1, 50_000))
    return Break({"target": DeviceSpec("small", 1, n_bytes)}, str(n_bytes), ("backend",))


def no_device(rng: Rng) -> Break:
    """What only looks like a device."""
    value = pick(rng, [DeviceSpec, ("small", 1, 50_000), {"cores": 1, "ub_bytes": 50_000}])
    return Break({"target": value}, repr(value), ("backend",))


def threads(family: Family, call: Arguments, rng: Rng) -> Break:
    value = pick(rng, [0, -1, 10**6, 2**70, 1.0, "1", True, np.array(1), np.array([1, 2]), [1], np.float32(1)])
    return Break({"threads": value}, f"{value}" if type(value) is int else repr(value))


def no_plan(family: Family, call: Arguments, rng: Rng) -> Break:
    value = pick(rng, [1, "plan", {}, plan_chunk, DIMS, np.zeros(1)])
    return Break({"plan": value}, type(value).__qualname__, ("backend",))


def plan_of_another_call(family: Family, call: Arguments, rng: Rng) -> Break:
    dims, sizes, dtype = pick(
        rng,
        [
            (DIMS, (4, 3), "float32"),
            (DIMS, (3, 4), "float16"),
            (DIMS._replace(dk=4), (3, 4), "float32"),
            (DIMS._replace(n_sequences=1), (7,), "float32"),
        ],
    )
    if call["backend"] == "fast":
        return plan_of_another_call_on_fast(rng, dims, sizes, dtype)
    plan = plan_chunk(dims, sizes, dtype=dtype)
    return Break({"plan": plan}, repr(plan.key), ("backend",))


def plan_of_another_call_on_fast(rng: Rng, dims: Dims, sizes: tuple[int, ...], dtype: str) -> Break:
    """A plan of another kind, or of other sizes (a host's plans are for every dtype)."""
    if dtype != "float32" or rng.random() < 0.5:
        return Break({"plan": plan_chunk(dims, sizes, dtype=dtype)}, "Plan", ("backend",))
    plan = plan_host(dims, sizes, 2, 10**6)
    return Break({"plan": plan}, repr(plan.key), ("backend",))


def plan_and_more(family: Family, call: Arguments, rng: Rng) -> Break:
    name, value = pick(rng, [("target", "310p"), ("target", "host"), ("threads", 1)])
    plan = plan_chunk(DIMS, (3, 4), dtype="float32")
    return Break({"plan": plan, name: value, "backend": "faithful"}, repr(value))


def options_of_faithful(family: Family, call: Arguments, rng: Rng) -> Break:
    """What golden has no use for, or fast."""
    if call["backend"] == "fast":
        name, value = pick(rng, [("axpy", "fused"), ("overflow", "saturate")])
        return Break({name: value, "backend": "fast"}, repr(value))
    name, value = pick(rng, [("target", "310p"), ("target", "host"), ("axpy", "fused"), ("overflow", "saturate")])
    return Break({name: value, "backend": "golden"}, repr(value))


def float64(family: Family, call: Arguments, rng: Rng) -> Break:
    wide = {name: call[name].astype(np.float64) for name in family.tensors[:3]}
    backend = "fast" if call["backend"] == "fast" else "faithful"
    return Break({**wide, "backend": backend}, "float64")


# Keywords


def unknown_keyword(family: Family, call: Arguments, rng: Rng) -> Break:
    name = pick(rng, ["sclae", "chunk_size", "head_first", "scale_value", "Q", "out", "cu_seqlens_cpu", "gk"])
    return Break({name: pick(rng, [None, 64, "x"])}, f"'{name}'")


def missing_keyword(family: Family, call: Arguments, rng: Rng) -> Break:
    fla = family.lengths == "cu_seqlens"
    name = pick(rng, ["q", "k", "v"] if fla else ["beta", "initial_state", "actual_seq_lengths", "key"])
    return Break({name: MISSING}, f"'{name}'")


TENSOR_BREAKERS: list[Breaker] = [
    wrong_type, masked, byte_order, no_float, other_dtype, another_rank, another_shape, heads_that_do_not_divide,
]  # fmt: skip
LENGTH_BREAKERS: list[Breaker] = [lengths, no_lengths, another_number_of_sequences]
OPTION_BREAKERS: list[Breaker] = [
    scale, choice, target, small_device, threads, no_plan, plan_of_another_call, plan_and_more, options_of_faithful,
    float64,
]  # fmt: skip
FLA_BREAKERS: list[Breaker] = [flag, gate_options]
KEYWORD_BREAKERS: list[Breaker] = [unknown_keyword, missing_keyword]
BREAKERS = [*TENSOR_BREAKERS, turned_state, *LENGTH_BREAKERS, *FLA_BREAKERS, *OPTION_BREAKERS, *KEYWORD_BREAKERS]


def breaks_of(rng: Rng, family: Family, call: Arguments) -> list[Break]:
    """One to three breaks of different arguments."""
    breaks: list[Break] = []
    changed: set[str] = set()
    n_breaks = int(rng.integers(1, 4))
    while len(breaks) < n_breaks:
        breaker = pick(rng, BREAKERS)
        if breaker in FLA_BREAKERS and family.lengths != "cu_seqlens":
            continue
        one = breaker(family, call, rng)
        if not changed & set(one.changes):
            breaks.append(one)
            changed |= set(one.changes)
    return breaks
