"""What must not change a single bit: tiles, paths, bins, threads, mates, old memory, the family, compilation."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from bits import (
    INPUT_DTYPES,
    TENSORS,
    Call,
    assert_same,
    difference,
    every_option,
    faithful,
    faithful_fla,
    make_call,
    poked,
    sampled,
    save_sampled,
)
from cgdr_numba import DeviceSpec, chunk_gated_delta_rule, plan_chunk
from cgdr_numba.core import memory
from cgdr_numba.sched.plan import Plan
from reference import Result

slow = pytest.mark.slow
DEVICE = DeviceSpec("roomy", cores=8, ub_bytes=4_000_000)
"""A device on which every V tile fits."""


def plan_of(call: Call, cores: int, v_step: int | None = None) -> Plan:
    """A plan of the call for that many cores and columns."""
    device = replace(DEVICE, cores=cores)
    return plan_chunk(call.dims, call.lengths, dtype=call.query.dtype.name, target=device, v_step=v_step)


def assert_tiles_do_not_matter(call: Call, widths: tuple[int, ...], **options: Any) -> set[tuple[bool, ...]]:
    """The same bits for every V tile, on one core and on eight; gives (split, overlap, Q cached, K by DMA) of all."""
    expected = faithful(call, **options)
    kinds = set()
    for cores in (1, 8):
        for v_step in widths:
            plan = plan_of(call, cores, v_step)
            assert plan.tiling.v_step == v_step
            facts = plan.as_dict()
            kinds.add(tuple(facts[name] for name in ("split", "overlap", "q_cached", "k_dma")))
            assert_same(faithful(call, plan=plan, **options), expected)
    return kinds


@every_option
@pytest.mark.parametrize("value", [None, np.inf, np.nan], ids=["finite", "inf", "nan"])
def test_tiles_and_paths_of_a_few_tokens(value: float | None, options: dict[str, str]) -> None:
    call = make_call(21, (3,), dims=(32, 33), dtype=np.float16)
    kinds = assert_tiles_do_not_matter(call if value is None else poked(call, value), (16, 32, 48), **options)
    assert {split for split, *_ in kinds} == {True, False}


@slow
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@every_option
@pytest.mark.parametrize("value", [None, np.inf, -np.inf, np.nan], ids=["finite", "inf", "-inf", "nan"])
def test_tiles_and_paths(dtype: Any, value: float | None, options: dict[str, str]) -> None:
    call = make_call(21, (70, 33), dims=(128, 128), dtype=dtype)
    call = call if value is None else poked(call, value)
    kinds = assert_tiles_do_not_matter(call, (16, 64, 80, 128), **options)
    splits, overlaps, *paths = (set(fact) for fact in zip(*kinds, strict=True))
    assert splits == overlaps == {True, False}
    assert paths == ([{True, False}] * 2 if dtype == np.float16 else [{False}] * 2)


@slow
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64])
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_rows_about_the_limit_of_the_q_cache(length: int, overflow: str) -> None:
    call = make_call(22, (length,), heads=(1, 1), dims=(128, 128), dtype=np.float16).but(scale=1e6)
    assert plan_of(call, 1, 64).paths.q_cache_rows == 32
    for one in (call, poked(call, np.inf)):
        assert_tiles_do_not_matter(one, (16, 64, 128), overflow=overflow)


@slow
@every_option
def test_widths_that_tiles_do_not_divide(options: dict[str, str]) -> None:
    for dv in (20, 33, 100):
        for dtype in (np.float16, np.float32):
            call = make_call(23, (66,), dims=(48, dv), dtype=dtype)
            assert_tiles_do_not_matter(call, tuple(range(16, dv + 16, 16)), **options)


@every_option
@pytest.mark.parametrize("lengths", [(1, 2, 0, 1), pytest.param((5, 70, 0, 64, 1, 130), marks=slow)], ids=str)
def test_bins(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    call = make_call(24, lengths, heads=(2, 8), dims=(8, 4))
    expected = faithful(call, **options)
    n_bins = []
    for cores in range(1, 9):
        n_bins.append(plan_of(call, cores).n_bins)
        assert_same(faithful(call, target=replace(DEVICE, cores=cores), **options), expected)
    assert n_bins[:3] == [1, 2, 3]
    assert max(n_bins) > 5


@slow
def test_bins_at_the_same_time() -> None:
    """Long sequences of equal lengths: bins that shared any memory would meet there, chunk after chunk."""
    call = make_call(24, (2560, 2560), heads=(1, 8), dims=(16, 16))
    expected = faithful(call, plan=plan_of(call, 1))
    assert plan_of(call, 8).n_bins == 8
    for _ in range(3):
        assert_same(faithful(call, target=DEVICE), expected)


@every_option
@pytest.mark.parametrize("lengths", [(4, 2), pytest.param((70, 130), marks=slow)], ids=str)
def test_targets(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    call = make_call(25, lengths, dims=(32, 48))
    expected = faithful(call, **options)
    for target in ("310p", "host", DEVICE, DeviceSpec("narrow", cores=3, ub_bytes=90_000)):
        assert_same(faithful(call, target=target, **options), expected)


@every_option
@pytest.mark.parametrize("lengths", [(2, 1), pytest.param((70, 130, 64), marks=slow)], ids=str)
def test_threads(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    call = make_call(26, lengths, heads=(2, 8), dims=(16, 16))
    expected = faithful(call, **options)
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        for _ in range(3):
            assert_same(faithful(call, threads=threads, **options), expected)


@every_option
@pytest.mark.parametrize("lengths", [(3, 0, 1), pytest.param((70, 3, 0, 64, 130), marks=slow)], ids=str)
def test_sequences_alone_or_packed(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    call = make_call(27, lengths, heads=(1, 2), dims=(16, 20))
    out, state = faithful(call, **options)
    starts = np.cumsum([0, *lengths])
    for n, (begin, end) in enumerate(pairwise(starts)):
        tokens = {name: getattr(call, name)[begin:end] for name in TENSORS if name != "initial_state"}
        alone = call.but(**tokens, initial_state=call.initial_state[n : n + 1], lengths=(int(end - begin),))
        assert_same(faithful(alone, **options), Result(out[begin:end], state[n : n + 1]))


@every_option
@pytest.mark.parametrize("lengths", [(3, 1), pytest.param((70, 65), marks=slow)], ids=str)
def test_heads_alone_or_with_mates(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    call = make_call(28, lengths, heads=(2, 6), dims=(16, 20))
    out, state = faithful(call, **options)
    for h in range(6):
        heads = {name: getattr(call, name)[:, h : h + 1] for name in ("value", "g", "beta", "initial_state")}
        heads |= {name: getattr(call, name)[:, h // 3 : h // 3 + 1] for name in ("query", "key")}
        assert_same(faithful(call.but(**heads), **options), Result(out[:, h : h + 1], state[:, h : h + 1]))


@every_option
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_do_not_leak_to_mates(name: str, value: float, options: dict[str, str]) -> None:
    """One sequence and head full of NaN or infinities changes nothing in the others."""
    call = make_call(29, (2, 2), heads=(2, 2), dims=(8, 8))
    out, state = faithful(call, **options)
    ill = getattr(call, name).copy()
    ill[(0, 0) if name == "initial_state" else (slice(0, 2), 0)] = value
    ill_out, ill_state = faithful(call.but(**{name: ill}), **options)
    well_out, well_state = np.ones(out.shape, bool), np.ones(state.shape, bool)
    well_out[:2, 0] = well_state[0, 0] = False
    assert_same(Result(ill_out[well_out], ill_state[well_state]), Result(out[well_out], state[well_state]))
    assert difference(Result(ill_out, ill_state), Result(out, state))


@every_option
@pytest.mark.parametrize(
    ("lengths", "repeats"), [((3, 0, 1), 3), pytest.param((70, 0, 130), 20, marks=slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_repeats_in_garbage(
    lengths: tuple[int, ...], repeats: int, dtype: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(37, lengths, heads=(1, 2), dims=(32, 40), dtype=dtype)
    plans = [plan_of(call, 8, 48), plan_of(call, 8, 16), plan_of(call, 1, 16)]
    expected = faithful(call, **options)
    rng = np.random.default_rng(37)
    allocators, n_allocations = {name: getattr(memory, name) for name in ("empty", "result")}, 0

    def garbage(shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        nonlocal n_allocations
        n_allocations += 1
        array = allocators[name](shape, dtype)
        words = array.reshape(-1).view(np.uint16)
        words[...] = rng.integers(0, 2**16, words.size, np.uint16)
        return array

    for name in allocators:
        monkeypatch.setattr(memory, name, partial(garbage, name=name))
    for i in range(repeats):
        kept = [np.full(int(n), np.inf) for n in rng.integers(1, 10_000, 10)]
        assert_same(faithful(call, plan=plans[i % 3], **options), expected)
        del kept
    assert n_allocations == 4 * repeats


def test_results_are_arrays_of_their_own() -> None:
    call = make_call(38, (4,))
    first = faithful(call)
    kept = Result(*(x.copy() for x in first))
    second = faithful(call.but(value=2 * call.value))
    assert not np.shares_memory(first.out, second.out)
    assert_same(first, kept)


@every_option
@pytest.mark.parametrize("length", [5, pytest.param(130, marks=slow)])
def test_what_is_left_out(length: int, options: dict[str, str]) -> None:
    call = make_call(39, (length, 2), dims=(16, 20))
    shape = call.beta.shape
    full = call.but(
        g=np.zeros(shape, np.float32),
        beta=np.ones(shape, np.float32),
        initial_state=np.zeros_like(call.initial_state),
        scale=16**-0.5,
    )
    expected = faithful(full, **options)
    assert_same(faithful(full.but(g=None), **options), expected)
    assert_same(faithful_fla(full.but(g=None), **options), expected)
    tokens = (x[None] for x in (call.query, call.key, call.value))
    cu = np.cumsum([0, length, 2])
    out, state = chunk_gated_delta_rule(*tokens, backend="faithful", output_final_state=True, cu_seqlens=cu, **options)
    assert_same(Result(out[0], state.swapaxes(2, 3)), expected)


@every_option
@pytest.mark.parametrize("lengths", [(3, 0, 2), pytest.param((70, 0, 130), marks=slow)], ids=str)
def test_families(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    for dtype in (np.float16, np.float32):
        call = make_call(40, lengths, heads=(2, 4), dims=(16, 20), dtype=dtype)
        call = call.but(initial_state=call.initial_state.astype(np.float32))
        assert_same(faithful_fla(call, **options), faithful(call, **options))


@pytest.mark.parametrize("length", [3, pytest.param(70, marks=slow)])
def test_batch_rows_or_packed_sequences(length: int) -> None:
    call = make_call(41, (length,) * 3, heads=(2, 4), dims=(16, 20))
    tokens = [x.reshape(3, length, *x.shape[1:]) for x in (call.query, call.key, call.value, call.g, call.beta)]
    states = call.initial_state.swapaxes(2, 3)
    out, state = chunk_gated_delta_rule(
        *tokens, backend="faithful", scale=call.scale, initial_state=states, output_final_state=True
    )
    assert_same(Result(out.reshape(call.value.shape), state.swapaxes(2, 3)), faithful(call))


def test_compiled_or_plain_python(tmp_path: Path) -> None:
    """The same calls in another process, where kernels are compiled if they are not here, and the reverse."""
    path = tmp_path / "results.npz"
    other = "0" if numba.config.DISABLE_JIT else "1"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": other, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = (
        "import sys, numba, bits\n"
        f"assert numba.config.DISABLE_JIT == {other}\n"
        f"bits.{save_sampled.__name__}(sys.argv[1])"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    with np.load(path) as there:
        for name, here in sampled().items():
            found = difference(here, Result(there[f"{name}, out"], there[f"{name}, state"]))
            assert not found, f"{name}: {found}"
