"""Benchmarks: parity first, then speed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cgdr_numba.parity.cases import Workload, make_inputs
from gate import FP16_RMS, FP32_RMS, run, stop_where_red, worst_head


@pytest.fixture
def checked() -> Callable[..., dict[str, Any]]:
    """A function that returns a workload's inputs, or skips the benchmark where the backend's parity is red."""

    def check(workload: Workload, backend: str, dtype: Any = np.float16) -> dict[str, Any]:
        inputs = make_inputs(workload, dtype)
        heads = slice(0, workload.hv // workload.hk)
        few = {name: x[:, :1] if name in ("q", "k") else x[:, heads] for name, x in inputs.items()}
        small = Workload(workload.name, workload.lengths, 1, heads.stop, workload.dk, workload.dv)
        golden = run({name: x.astype(np.float64) for name, x in few.items()}, small, "golden")
        out, state = run(inputs, workload, backend)
        errors = [worst_head(x[:, heads], truth) for x, truth in zip((out, state), golden, strict=True)]
        stop_where_red(errors, FP16_RMS if dtype == np.float16 else FP32_RMS)
        return inputs

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what benchmarks say of themselves beside their times: ratios to what the machine allows, and to ours."""
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    rows = [] if session is None else [(b.name, b.extra_info) for b in session.benchmarks if b.extra_info]
    if rows:
        terminalreporter.section("ratios")
        for name, info in rows:
            shown = ", ".join(f"{key} {value}" for key, value in info.items() if key.startswith(("times", "ours")))
            if shown:
                terminalreporter.write_line(f"{name}: {shown}")
