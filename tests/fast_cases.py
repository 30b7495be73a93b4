"""Calls of fast's chunked form in either state layout, and the shapes that its promises are tried on."""

from typing import Any

import ml_dtypes
import numpy as np

from cgdr_numba import DeviceSpec
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.fast.chunk_arena import chunk_bytes
from cgdr_numba.sched.host_plan import plan_host
from judge import run_fla, same_bits
from reference import Array, Case, Result, make_case

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]
WIDTHS = [(128, 128), (64, 48), (37, 53), (5, 7), (1, 1), (16, 130)]
LENGTHS = (0, 83, 17, 3, 64, 1, 0, 35)
TENSORS = ("q", "k", "v", "g", "beta")


def fast_case(
    seed: int,
    lengths: tuple[int, ...] | int,
    *,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 24),
    dtype: Any = np.float32,
    v_first: bool = False,
    **options: Any,
) -> Case:
    """Random inputs: q, k and v in `dtype`, the rest in float32; an integer makes it one sequence, unpacked."""
    cu = None if isinstance(lengths, int) else np.cumsum((0, *lengths))
    t = lengths if cu is None else int(cu[-1])
    case = make_case(seed, t=t, heads=heads, dims=dims, cu=cu, **options)
    state = np.ascontiguousarray(case.state.swapaxes(2, 3)) if v_first and case.state is not None else case.state
    return case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")}, state=state)


def run_fast(case: Case, v_first: bool = False, **options: Any) -> Result:
    """The case through chunk_gated_delta_rule on fast; the states have the layout that `v_first` says."""
    return run_fla(case, "fast", state_v_first=v_first, **options)


def of_sequences(case: Case, order: list[int]) -> Case:
    """Some sequences of a packed case, in another order, packed anew."""
    ranges = [(begin, end) for _, begin, end in case.sequences()]
    tokens = np.concatenate([np.arange(*ranges[n]) for n in order]).astype(int)
    tensors = {name: getattr(case, name)[:, tokens] for name in TENSORS}
    cu = np.cumsum([0, *(ranges[n][1] - ranges[n][0] for n in order)])
    return case.but(**tensors, state=None if case.state is None else case.state[order], cu=cu)


def result_of_sequences(case: Case, result: Result, order: list[int]) -> Result:
    """What a result has for these sequences, in this order."""
    ranges = [(begin, end) for _, begin, end in case.sequences()]
    tokens = np.concatenate([np.arange(*ranges[n]) for n in order]).astype(int)
    return Result(result.out[:, tokens], result.state[order])


def of_heads(case: Case, first: int, end: int) -> Case:
    """Key heads first to end, with their value heads."""
    group = case.v.shape[2] // case.q.shape[2]
    own = slice(first * group, end * group)
    keys = {name: getattr(case, name)[:, :, first:end] for name in ("q", "k")}
    values = {name: getattr(case, name)[:, :, own] for name in ("v", "g", "beta")}
    return case.but(**keys, **values, state=case.state[:, own])


def devices(case: Case) -> dict[tuple[int, int], DeviceSpec]:
    """Devices by the (bins, tile width) of the plans that come out for the case: as many kinds as there are."""
    (hk, dk), (hv, dv) = case.q.shape[2:], case.v.shape[2:]
    lengths = tuple(case.lengths)
    dims = Dims(sum(lengths), len(lengths), hk, hv, dk, dv)
    sizes = [chunk_bytes(dk, dv, width, hv // hk) for width in (16, 32, 64, 128, 144)]
    found = {}
    for cores in (1, 2, 3, 8):
        for ub_bytes in (1, *sizes):
            plan = plan_host(dims, lengths, cores, ub_bytes)
            found[plan.n_bins, plan.width] = DeviceSpec("tried", cores=cores, ub_bytes=ub_bytes)
    return found


def difference(actual: Result, expected: Result) -> str:
    """Which of out and state differ in a bit, and how many elements; nothing where none does."""
    found = []
    for name, a, e in zip(Result._fields, actual, expected, strict=True):
        if not same_bits(a, e):
            found.append(f"{name}: {differing(a, e)} of {e.size} elements")
    return ", ".join(found)


def differing(a: Array, e: Array) -> Any:
    """How many elements differ, or how shapes or dtypes do."""
    if (a.shape, a.dtype) != (e.shape, e.dtype):
        return f"{a.dtype} {a.shape} instead of {e.dtype} {e.shape}, so all"
    return int(((a != e) & ~((a != a) & (e != e))).sum())
