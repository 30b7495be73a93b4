"""Calls of fast's chunked form in either state layout, the shapes that its promises are tried on, and its judge."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cgdr_numba import DeviceSpec
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.fast.chunk_arena import chunk_bytes
from cgdr_numba.sched.host_plan import plan_host
from judge import run_fla, same_bits
from reference import Array, Case, Result, make_case, normalised, part, relative_rms, token_loop

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


LIMIT = 1e-6
"""Relative rms that float32 keeps in every (sequence, head)."""
FEW_NUMBERS, FEW_TOKENS = 16, 8
"""Fewer numbers, or outputs of fewer tokens, may all be left with next to nothing of what they were made from."""
INPUTS = (*TENSORS, "state")


def blocks(case: Case, result: Result) -> Iterator[tuple[str, Array]]:
    """Out and state of every (sequence, head), with words for where that is; states with K first."""
    for n, (row, begin, end) in enumerate(case.sequences()):
        for h in range(case.v.shape[2]):
            yield f"out of sequence {n}, head {h}", result.out[row, begin:end, h]
            yield f"state of sequence {n}, head {h}", result.state[n, h]


def sizes_on_the_way(case: Case) -> Iterator[float]:
    """As `blocks` has them: the largest norms that q against states, and states, had on the way."""
    tensors = {name: np.asarray(x, np.float64) for name in INPUTS if (x := getattr(case, name)) is not None}
    group = case.v.shape[2] // case.q.shape[2]
    for n, (row, begin, end) in enumerate(case.sequences()):
        alone = case.but(**{name: tensors[name][row : row + 1] for name in TENSORS}, cu=None)
        state = np.asarray(case.initial_state()[n : n + 1], np.float64)
        of_state = np.linalg.norm(state[0], axis=(1, 2))
        of_out = np.zeros_like(of_state)
        for t in range(begin, end):
            token = part(alone, t, t + 1, state)
            decayed = np.exp(token.g[0, 0]) * np.linalg.norm(state[0], axis=(1, 2))
            state = token_loop(token).state
            # What a token writes may take away nearly all that was there.
            norms = np.maximum(decayed, np.linalg.norm(state[0], axis=(1, 2)))
            q = (normalised(token.q) if case.l2norm else token.q)[0, 0].repeat(group, axis=0)
            of_state = np.maximum(of_state, norms)
            of_out = np.maximum(of_out, abs(case.factor) * np.linalg.norm(q, axis=1) * norms)
        yield from np.stack([of_out, of_state], axis=1).ravel().tolist()


def worst(case: Case, actual: Result, exact: Result, dtype: Any = np.float32) -> tuple[float, float, str]:
    """(relative rms over its limit, relative rms, where): the largest share of its limit, of all sequences and heads.

    The limit is 1e-6, or 1.1 times what rounding the exact output to `dtype` costs. A few numbers may cancel all
    together (as out of one token does where q and k are at right angles), so they are measured by the largest that
    stood in their place.
    """
    largest, found = None, [(0.0, 0.0, "nowhere")]
    pairs = zip(blocks(case, actual), blocks(case, exact), strict=True)
    for i, ((where, a), (_, e)) in enumerate(pairs):
        rr, limit = relative_rms(a, e), LIMIT
        are_few = e.size < FEW_NUMBERS or (where.startswith("out") and len(e) < FEW_TOKENS)
        if rr > LIMIT and are_few and np.linalg.norm(e) > 0:
            largest = largest or list(sizes_on_the_way(case))
            limit = LIMIT * max(1, largest[i] / np.linalg.norm(e))
        if where.startswith("out") and np.dtype(dtype) != np.float32:
            floor = relative_rms(e.astype(dtype), e)
            limit = max(1.1 * floor, floor + limit)
        found.append((rr / limit, rr, where))
    return max(found)
