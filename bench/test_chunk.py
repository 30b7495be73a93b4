"""How fast the chunked operator runs: ``pytest bench --benchmark-enable``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from batches import Batch
from cgdr_numba import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from cgdr_numba.core.memory import empty
from cgdr_numba.parity.cases import WORKLOADS, Workload
from gate import FP32_CHUNK_RMS, FP32_RMS, admit, run
from peers import PREFILL_PEERS, Call, Peer
from threads import on_threads
from turns import Turns
from yardsticks import fma_rate

FAITHFUL = ["P1", "P4", "latency-1x8x64x64", "latency-1x16x128x128", "latency-1x1x128x256", "latency-2x8x512x128"]


@pytest.mark.benchmark(group="chunk")
@on_threads
@pytest.mark.parametrize("name", FAITHFUL)
def test_faithful(benchmark: Any, checked: Callable[[Workload, str], dict[str, Any]], name: str, threads: int) -> None:
    workload = WORKLOADS[name]
    inputs = checked(workload, "faithful")
    benchmark.extra_info |= {"flops": workload.flops, "threads": threads, "dtype": "float16", "dims": workload.dims}
    benchmark.pedantic(run, (inputs, workload, "faithful"), {"threads": threads}, rounds=7, warmup_rounds=1)


SCALING = (
    Workload("T 1024", (1024,), 4, 8),
    Workload("T 2048", (2048,), 4, 8),
    Workload("T 4096", (4096,), 4, 8),
    Workload("1 key head, T 4096", (4096,), 1, 2),
    Workload("T 4000", (4000,), 2, 4),
    Workload("T 4000 + 10 + 10 + 10", (4000, 10, 10, 10), 2, 4),
)
"""How time grows with tokens, and how few heads and uneven sequences fill two cores."""


def time_fast(benchmark: Any, workload: Workload, inputs: dict[str, Any], threads: int) -> None:
    """Time fast, and put its median beside the time of 6 T Hv Dk Dv flops at the measured rate."""
    floor = workload.flops / (fma_rate() * threads)
    benchmark.pedantic(run, (inputs, workload, "fast"), {"threads": threads}, rounds=15, warmup_rounds=2)
    if benchmark.enabled:
        median = benchmark.stats.stats.median
        benchmark.extra_info |= {
            "threads": threads,
            "flops": workload.flops,
            "times 6 T Hv Dk Dv": round(median / floor, 3),
        }


@pytest.mark.benchmark(group="chunk, fast")
@on_threads
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", ["P1", "P2", "P3", "P4"])
def test_fast(benchmark: Any, checked: Callable[..., Any], name: str, dtype: Any, threads: int) -> None:
    workload = WORKLOADS[name]
    time_fast(benchmark, workload, checked(workload, "fast", dtype), threads)


@pytest.mark.benchmark(group="chunk, fast: scaling")
@on_threads
@pytest.mark.parametrize("workload", SCALING, ids=lambda workload: workload.name)
def test_scaling(benchmark: Any, checked: Callable[..., Any], workload: Workload, threads: int) -> None:
    time_fast(benchmark, workload, checked(workload, "fast"), threads)


@pytest.mark.benchmark(group="chunk, fast: strides")
@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", ["P1", "P2"])
def test_channel_major(benchmark: Any, checked: Callable[..., Any], name: str, dtype: Any) -> None:
    """Pin q, k and v to lie as a causal convolution leaves them: slices of one buffer [channels, T] on a cache line."""
    inputs = checked(WORKLOADS[name], "fast", dtype)
    channels = np.concatenate([inputs[n].reshape(len(inputs[n]), -1) for n in ("q", "k", "v")], axis=1)
    buffer = empty(channels.shape[::-1], dtype)
    buffer[:] = channels.T
    turned, first = {}, 0
    for n in ("q", "k", "v"):
        n_tokens, *widths = inputs[n].shape
        last = first + widths[0] * widths[1]
        turned[n] = buffer[first:last].reshape(*widths, n_tokens).transpose(2, 0, 1)
        first = last
    turns = Turns(
        lambda: run(inputs, WORKLOADS[name], "fast", threads=1),
        lambda: run(inputs | turned, WORKLOADS[name], "fast", threads=1),
        3,
    )
    benchmark.pedantic(run, (inputs | turned, WORKLOADS[name], "fast"), {"threads": 1}, setup=turns, rounds=21)
    if benchmark.enabled:
        benchmark.extra_info |= {"times rows of tokens": round(benchmark.stats.stats.median / turns.ours, 3)}


@pytest.mark.benchmark(group="few tokens")
@pytest.mark.parametrize("n_tokens", [2, 4, 8, 12, 16, 24, 32, 64])
def test_few_tokens(benchmark: Any, n_tokens: int) -> None:
    """Pin the chunked operator beside the recurrent one on the same tokens."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, n_tokens, 8, 128)).astype(np.float32)
    v = rng.standard_normal((1, n_tokens, 16, 128)).astype(np.float32)
    gates = {"g": np.full((1, n_tokens, 16), -0.1, np.float32), "beta": np.full((1, n_tokens, 16), 0.5, np.float32)}
    options = gates | {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "threads": 1}
    turns = Turns(
        lambda: chunk_gated_delta_rule(q, k, v, **options),
        lambda: fused_recurrent_gated_delta_rule(q, k, v, **options),
        50,
    )
    benchmark.pedantic(fused_recurrent_gated_delta_rule, (q, k, v), options, setup=turns, rounds=400)
    if benchmark.enabled:
        benchmark.extra_info |= {"times chunked": round(benchmark.stats.stats.median / turns.ours, 3)}


def prepare_chunk(batches: Sequence[Batch], n_threads: int) -> Call:
    """Prepare ours in the form of a peer: the packed sequences of a workload in one call."""
    packed = {n: np.concatenate([batch[n] for batch in batches], axis=1) for n in ("q", "k", "v", "g", "beta")}
    state = np.concatenate([batch["state"] for batch in batches])
    lengths = [batch["q"].shape[1] for batch in batches]
    ends = np.cumsum(lengths)
    options = {"cu_seqlens": [0, *ends.tolist()], "output_final_state": True, "threads": n_threads}

    def call() -> list[tuple[Any, Any]]:
        out, final = chunk_gated_delta_rule(**packed, initial_state=state, **options)
        return [(out[:, end - n : end], final[i : i + 1]) for i, (end, n) in enumerate(zip(ends, lengths, strict=True))]

    return call


@pytest.mark.benchmark(group="prefill beside peers")
@pytest.mark.parametrize("peer", PREFILL_PEERS, ids=str)
@on_threads
@pytest.mark.parametrize("name", ["P1", "P2", "P3", "P4"])
def test_peer(benchmark: Any, name: str, threads: int, peer: Peer) -> None:
    theirs = admit(peer, name, threads, FP32_CHUNK_RMS)
    ours = admit(Peer("chunk_gated_delta_rule", prepare_chunk), name, threads, FP32_RMS)
    turns = Turns(ours, theirs, 3)
    benchmark.pedantic(theirs, setup=turns, rounds=9)
    if benchmark.enabled:
        benchmark.extra_info |= {
            "threads": threads,
            "ours, ms": round(turns.ours * 1e3, 3),
            "ours, preempted": turns.n_preempted,
            "times ours": round(benchmark.stats.stats.median / turns.ours, 2),
        }
