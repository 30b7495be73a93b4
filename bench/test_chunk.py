"""How fast the chunked operator runs: ``pytest bench --benchmark-enable``."""

from collections.abc import Callable
from typing import Any

import pytest

from cgdr_numba.parity.cases import WORKLOADS, Workload
from gate import FP32_CHUNK_RMS, admit, run
from peers import PREFILL_PEERS, Peer
from threads import on_threads

FAITHFUL = ["P1", "P4", "latency-1x8x64x64", "latency-1x16x128x128", "latency-1x1x128x256", "latency-2x8x512x128"]


@pytest.mark.benchmark(group="chunk")
@on_threads
@pytest.mark.parametrize("name", FAITHFUL)
def test_faithful(benchmark: Any, checked: Callable[[Workload, str], dict[str, Any]], name: str, threads: int) -> None:
    workload = WORKLOADS[name]
    inputs = checked(workload, "faithful")
    benchmark.extra_info |= {"flops": workload.flops, "threads": threads, "dtype": "float16", "dims": workload.dims}
    benchmark.pedantic(run, (inputs, workload, "faithful"), {"threads": threads}, rounds=7, warmup_rounds=1)


@pytest.mark.benchmark(group="prefill, peers")
@pytest.mark.parametrize("peer", PREFILL_PEERS, ids=str)
@on_threads
@pytest.mark.parametrize("name", ["P1", "P2", "P3", "P4"])
def test_peer(benchmark: Any, name: str, threads: int, peer: Peer) -> None:
    call = admit(peer, name, threads, FP32_CHUNK_RMS)
    benchmark.extra_info |= {"flops": WORKLOADS[name].flops, "threads": threads, "dtype": "float32"}
    benchmark.pedantic(call, rounds=7, warmup_rounds=1)
