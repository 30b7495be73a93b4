"""The fast backend over a pool: the bits of the plain recurrent function, and what they may not depend on."""

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import DtypeError, fused_recurrent_gated_delta_rule
from cgdr_numba.core.threads import most_threads
from conftest import COMPILED
from pool_cases import PoolCase, PoolResult, assert_right, make_pool_case, run, same, tokens

bf16 = ml_dtypes.bfloat16
GATES = ["g", "scalar", "g vector"]
every_gate = pytest.mark.parametrize("gates", GATES)
LENGTHS = (1, 5, 0, 9, 70) if COMPILED else (1, 5, 0, 3)


def one_slot_each(case: PoolCase) -> PoolCase:
    """The case with the first slots, one for all tokens of a sequence."""
    return case.but(slots=np.repeat(np.arange(len(case.lengths)), case.lengths), accepted=None)


def through_the_plain_function(case: PoolCase, **options: Any) -> PoolResult:
    """A case of one slot each through fused_recurrent_gated_delta_rule."""
    n = len(case.lengths)
    states = case.state[:n].astype(np.float32)
    batched = {
        name: None if x is None else x[None] for name, x in (("g", case.g), ("gk", case.gk), ("beta", case.beta))
    }
    out, _ = fused_recurrent_gated_delta_rule(
        case.query[None],
        case.key[None],
        case.value[None],
        **batched,
        scale=1.0 if case.scale is None else case.scale,
        initial_state=states,
        out_state=states,
        state_v_first=True,
        cu_seqlens=np.cumsum([0, *case.lengths]),
        **options,
    )
    return PoolResult(out[0], np.concatenate([states, case.state[n:]]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bf16])
@pytest.mark.parametrize("gates", ["", "g", "vector", "g vector"])
def test_a_float32_pool_has_the_plain_functions_bits(gates: str, dtype: Any) -> None:
    case = one_slot_each(make_pool_case(1, LENGTHS, heads=(2, 4), dims=(40, 24), gates=gates, dtype=dtype))
    case = case.but(state=case.state.astype(np.float32))
    same(run(case, "fast"), through_the_plain_function(case))


@every_gate
@pytest.mark.parametrize("state", [np.float32, np.float16, bf16])
def test_slots_of_their_own_for_all_tokens_change_no_bit_of_out(state: Any, gates: str) -> None:
    """States stay float32 between the tokens of a call, whatever the pool holds and wherever they go."""
    apart = make_pool_case(2, LENGTHS, heads=(1, 2), dims=(33, 70), gates=gates, state=state)
    together = one_slot_each(apart)
    firsts = [int(apart.slots[t]) for t in np.cumsum([0, *apart.lengths])[:-1] if t < len(apart.slots)]
    pool = apart.state.copy()
    pool[: len(LENGTHS)] = apart.state[firsts]
    together = together.but(state=pool)
    a, b = run(apart, "fast"), run(together, "fast")
    assert a.out.tobytes() == b.out.tobytes()
    ends = np.cumsum(apart.lengths) - 1
    for n, length in enumerate(apart.lengths):
        if length:
            assert a.pool[apart.slots[ends[n]]].tobytes() == b.pool[n].tobytes()
    exact = run(together.but(state=together.state.astype(np.float32)), "fast")
    assert exact.out.tobytes() == b.out.tobytes()


@every_gate
@pytest.mark.parametrize("state", [np.float32, np.float16])
def test_bits_do_not_depend_on_threads_mates_or_heads(state: Any, gates: str) -> None:
    case = make_pool_case(3, LENGTHS, heads=(2, 6), dims=(24, 40), gates=gates, state=state, accepted=True)
    whole = run(case, "fast")
    for threads in sorted({1, most_threads()}):
        same(run(case, "fast", threads=threads), whole)
    stop = 0
    for n, length in enumerate(case.lengths):
        start, stop = stop, stop + length
        alone = tokens(case, list(range(start, stop)), (length,)).but(accepted=[case.accepted[n]])
        result = run(alone, "fast")
        assert result.out.tobytes() == whole.out[start:stop].tobytes()
        for slot in case.slots[start:stop]:
            assert result.pool[slot].tobytes() == whole.pool[slot].tobytes()
    few = {name: None if (x := getattr(case, name)) is None else x[:, :3] for name in ("value", "beta", "g", "gk")}
    half = case.but(query=case.query[:, :1], key=case.key[:, :1], state=case.state[:, :3], **few)
    same(run(half, "fast"), PoolResult(whole.out[:, :3], whole.pool[:, :3]))


@every_gate
def test_accepting_some_is_never_having_seen_the_others(gates: str) -> None:
    """A float32 pool keeps every bit, so that tokens accepted and new are as in one call."""
    first = make_pool_case(4, (4,), heads=(1, 2), dims=(40, 24), gates=gates, n_slots=9)
    second = make_pool_case(5, (4,), heads=(1, 2), dims=(40, 24), gates=gates, n_slots=9).but(slots=first.slots)
    for accepted in (1, 2, 3, 4):
        pool = run(first, "fast").pool
        actual = run(second.but(accepted=[accepted]), "fast", pool=pool)
        kept = tokens(first, list(range(accepted)), (accepted,))
        names = ("query", "key", "value", "beta", "g", "gk")
        both = {
            name: None if (x := getattr(kept, name)) is None else np.concatenate([x, getattr(second, name)])
            for name in names
        }
        slots = [int(first.slots[0]), *([int(first.slots[0])] * (accepted - 1)), *second.slots.tolist()]
        whole = run(kept.but(**both, slots=slots, lengths=(4 + accepted,)), "fast")
        assert whole.out[accepted:].tobytes() == actual.out.tobytes()
        for slot in second.slots:
            assert whole.pool[slot].tobytes() == actual.pool[slot].tobytes()


@every_gate
def test_pages_whose_rows_do_not_begin_at_whole_floats(gates: str) -> None:
    case = make_pool_case(6, (3, 2), heads=(1, 2), dims=(12, 10), gates=gates)
    expected = run(case, "fast")
    slots, hv, dv, dk = case.state.shape
    row, head = 4 * dk + 2, (4 * dk + 2) * dv + 6
    page = np.full(slots * (head * hv + 10), 0xA5, np.uint8)
    pool = np.ndarray(case.state.shape, np.float32, page, 0, (head * hv + 10, head, row, 4))
    pool[...] = case.state
    gaps = np.ones(len(page), bool)
    np.ndarray((*case.state.shape, 4), bool, gaps, 0, (*pool.strides, 1))[...] = False
    result = run(case, "fast", pool=pool)
    same(result._replace(pool=np.ascontiguousarray(pool)), expected)
    assert (page[gaps] == 0xA5).all()


@pytest.mark.skipif(not COMPILED, reason="plain NumPy makes arrays of its own")
@pytest.mark.parametrize("gates", ["g", "vector"])
def test_16_slots_of_4096_cost_the_16(gates: str) -> None:
    case = make_pool_case(7, (1,) * 16, heads=(1, 2), dims=(32, 32), gates=gates, n_slots=4096)
    expected = run(case, "fast")
    assert_right(case, expected, 1e-5)
    pool = case.state.copy()
    tracemalloc.start()
    try:
        run(case, "fast", pool=pool, threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.tobytes() == expected.pool.tobytes()
    assert peak < pool.nbytes // 64


def test_float64_is_goldens() -> None:
    case = make_pool_case(8, (2,))
    for changes in ({"state": case.state.astype(np.float64)}, {"query": case.query.astype(np.float64)}):
        wide = case.cast(np.float64, np.float32) if "query" in changes else case.but(**changes)
        with pytest.raises(DtypeError, match=r"a float64 `(query|state)` is golden's only"):
            run(wide, "fast")
