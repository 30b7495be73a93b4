"""Long calls in parts: the bits of one go, and Ctrl-C within one."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cgdr_numba import (
    Dims,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    npu_chunk_gated_delta_rule,
    parts,
    plan_chunk,
)
from cgdr_numba.core.dtypes import BFLOAT16

LENGTHS = (150, 0, 64, 65, 3, 201)
FLOPS = ("CHUNKS_FLOPS", "STEPS_FLOPS", "CHANNELS_FLOPS", "FAITHFUL_FLOPS")
"""What says how long calls in one go may be."""


@pytest.fixture
def n_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run every call in parts, as small as they get; the tokens of each part are collected."""
    seen: list[int] = []
    next_lengths = parts.next_lengths

    def noted(left: Any, n_tokens: int) -> Any:
        lengths = next_lengths(left, min(n_tokens, 200))
        seen.append(int(lengths.sum()))
        return lengths

    for name in FLOPS:
        monkeypatch.setattr(parts, name, 0.0)
    monkeypatch.setattr(parts, "next_lengths", noted)
    return seen


def call_arguments(dtype: Any, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """A packed call of fla's family, with a state."""
    rng, t = np.random.default_rng(3), sum(lengths)
    q, k = (rng.standard_normal((1, t, 2, 20)).astype(dtype) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": rng.standard_normal((1, t, 4, 24)).astype(dtype),
        "g": (-3 * rng.random((1, t, 4))).astype(np.float32),
        "beta": rng.random((1, t, 4)).astype(np.float32),
        "initial_state": rng.standard_normal((len(lengths), 4, 20, 24)),
        "cu_seqlens": np.cumsum([0, *lengths]),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }


def run_as_before(call: Any, n_parts: list[int]) -> None:
    """Compare a call in parts with the same in one go."""
    found = call()
    assert len(n_parts) > 1
    assert sum(n_parts) == sum(LENGTHS)
    with pytest.MonkeyPatch.context() as whole:
        for name in FLOPS:
            whole.setattr(parts, name, 1e12)
        n = len(n_parts)
        expected = call()
    assert len(n_parts) == n
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fast", "faithful"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("threads", [1, None])
def test_bits_of_one_go(backend: str, dtype: Any, state_v_first: bool, threads: Any, n_parts: list[int]) -> None:
    given = call_arguments(dtype)
    if state_v_first:
        given["initial_state"] = np.ascontiguousarray(given["initial_state"].swapaxes(2, 3))
    options = {"backend": backend, "state_v_first": state_v_first, "threads": threads}
    run_as_before(lambda: chunk_gated_delta_rule(**given, **options), n_parts)


@pytest.mark.slow
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels", [(), ("gk",), ("gv",), ("gk", "gv")], ids="+".join)
def test_bits_of_one_go_recurrent(
    state_v_first: bool, in_place: bool, channels: tuple[str, ...], n_parts: list[int]
) -> None:
    given = call_arguments(BFLOAT16)
    rng = np.random.default_rng(4)
    given |= {name: -rng.random((1, sum(LENGTHS), 4, 20 if name == "gk" else 24)) for name in channels}
    if state_v_first:
        given["initial_state"] = np.ascontiguousarray(given["initial_state"].swapaxes(2, 3))

    def call() -> Any:
        options = {**given, "state_v_first": state_v_first}
        if in_place:
            options["initial_state"] = options["out_state"] = given["initial_state"].astype(np.float32)
        return fused_recurrent_gated_delta_rule(**options)

    run_as_before(call, n_parts)


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "fast"},
        {"backend": "faithful"},
        {"backend": "faithful", "axpy": "fused"},
        {"backend": "faithful", "overflow": "saturate"},
        {"backend": "faithful", "target": "host"},
    ],
    ids=lambda options: "-".join(options.values()),
)
@pytest.mark.parametrize("hostile", [False, True])
def test_bits_of_one_go_in_canns_family(
    state_dtype: Any, options: dict[str, Any], hostile: bool, n_parts: list[int]
) -> None:
    """Final states in the dtype of the initial ones, with overflow and NaN in some heads."""
    given = call_arguments(np.float16)
    state = np.ascontiguousarray(given["initial_state"].swapaxes(2, 3))
    if hostile:
        given["v"][0, 70:80, 0], given["v"][0, 30, 1], given["k"][0, 400, 1] = 60000, np.nan, np.inf
        state[0, 0, 0, 0], state[5, 1, 2, 3] = np.inf, np.nan
    arrays = {name: given[short][0] for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
    arrays |= {"g": given["g"][0], "beta": given["beta"][0], "initial_state": state.astype(state_dtype)}
    lengths = np.array(LENGTHS)
    run_as_before(lambda: npu_chunk_gated_delta_rule(**arrays, actual_seq_lengths=lengths, **options), n_parts)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_a_given_plan_serves_parts_too(backend: Any, n_parts: list[int]) -> None:
    given = call_arguments(np.float16)
    dims = Dims(sum(LENGTHS), len(LENGTHS), 2, 4, 20, 24)
    plan = plan_chunk(dims, LENGTHS, backend=backend)
    run_as_before(lambda: chunk_gated_delta_rule(**given, backend=backend, plan=plan), n_parts)


@pytest.mark.slow
def test_batch_rows_in_parts(n_parts: list[int]) -> None:
    given = call_arguments(np.float32)
    del given["cu_seqlens"]
    t = sum(LENGTHS) // 3
    for name in ("q", "k", "v", "g", "beta"):
        given[name] = given[name].reshape(3, t, *given[name].shape[2:])
    given["initial_state"] = given["initial_state"][:3]
    run_as_before(lambda: chunk_gated_delta_rule(**given), n_parts)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from cgdr_numba import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, parts

name, n_tokens = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)


def call(t):
    q, v = (np.broadcast_to(np.float16(0.01), (1, t, 4, n)) for n in (128, 128))
    g = np.broadcast_to(np.float16(-0.1), (1, t, 4))
    if name == "recurrent":
        return fused_recurrent_gated_delta_rule(q, q, v, g=g, beta=-g, threads=1)
    return chunk_gated_delta_rule(q, q, v, g, -g, backend=name, threads=1)


def noted(left, size):
    lengths = next_lengths(left, size)
    done.append(int(lengths.sum()))
    return lengths


next_lengths, parts.next_lengths, done = parts.next_lengths, noted, []
call(70)
before = call(1000)[0].tobytes()
begin = time.perf_counter()
call(n_tokens)
whole = time.perf_counter() - begin
done.clear()
sent = []


def send():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)


threading.Timer(whole / 4, send).start()
try:
    call(n_tokens)
    print("not interrupted")
except KeyboardInterrupt:
    late = time.perf_counter() - sent[0]
    print(sum(done) < n_tokens, call(1000)[0].tobytes() == before, f"{late:.3f} s after the signal, of {whole:.3f} s")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_tokens"), [("fast", 200000), ("recurrent", 100000), ("faithful", 40000)])
def test_ctrl_c_ends_a_long_call(name: str, n_tokens: int) -> None:
    """One call that takes seconds begins no further tokens once a signal came, and the next call is right."""
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, name, str(n_tokens)], capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr[-2000:]
    print(found.stdout)
    assert found.stdout.startswith("True True")
