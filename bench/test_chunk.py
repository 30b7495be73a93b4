"""How fast the chunked operator runs: ``pytest bench --benchmark-enable``."""

from collections.abc import Callable
from typing import Any

import pytest

from cgdr_numba.parity.cases import WORKLOADS, Workload
from gate import run

FAITHFUL = ["P1", "P4", "latency-1x8x64x64", "latency-1x16x128x128", "latency-1x1x128x256", "latency-2x8x512x128"]


@pytest.mark.benchmark(group="chunk")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FAITHFUL)
def test_faithful(benchmark: Any, checked: Callable[[Workload, str], dict[str, Any]], name: str, threads: int) -> None:
    workload = WORKLOADS[name]
    inputs = checked(workload, "faithful")
    benchmark.extra_info |= {"flops": workload.flops, "threads": threads, "dtype": "float16", "dims": workload.dims}
    benchmark.pedantic(run, (inputs, workload, "faithful"), {"threads": threads}, rounds=7, warmup_rounds=1)
