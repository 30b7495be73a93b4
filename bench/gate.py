"""The gate in front of every benchmark: a run against golden."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from batches import make_batches, truth
from cgdr_numba import npu_chunk_gated_delta_rule
from cgdr_numba.parity.cases import Workload
from peers import Call, Peer

FP16_RMS = 4e-4
"""Largest relative rms of a head that still counts as right for float16 results."""
FP32_RMS = 1e-6
"""Largest relative rms of a head that still counts as right for float32, token by token."""
FP32_CHUNK_RMS = 4e-6
"""The same by chunks of 64 tokens: their sums of gates reach 52 in P1 to P4, where float32 numbers are 4e-6 apart."""


def run(inputs: dict[str, Any], workload: Workload, backend: str, **options: Any) -> tuple[Any, Any]:
    """Call the chunked operator on a workload's inputs."""
    return npu_chunk_gated_delta_rule(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        beta=inputs["beta"],
        initial_state=inputs["state"],
        actual_seq_lengths=workload.lengths,
        scale=workload.dk**-0.5,
        g=inputs["g"],
        backend=backend,
        **options,
    )


def worst_head(actual: Any, expected: Any) -> float:
    """Return the largest relative rms over heads (axis 1)."""
    error, size = actual.astype(np.float64) - expected, expected.astype(np.float64)
    axes = tuple(axis for axis in range(size.ndim) if axis != 1)
    return float(np.sqrt(np.max((error**2).sum(axes) / (size**2).sum(axes))))


def stop_where_red(errors: Iterable[float], limit: float) -> None:
    """Skip the benchmark where the largest error is beyond its limit, or no number."""
    worst = float(np.max([*errors]))
    if not worst <= limit:
        pytest.skip(f"parity is red: relative rms {worst:.2e} > {limit:g}, so no speed is shown")


def admit(peer: Peer, name: str, n_threads: int, limit: float, n_calls: int = 1) -> Call:
    """Return a peer's call on a named workload, or skip the benchmark where it is red after n_calls in a row."""
    call = peer.prepare(make_batches(name), n_threads)
    results = [[tuple(np.asarray(x).copy() for x in pair) for pair in call()] for _ in range(n_calls)]
    errors = []
    for i, (out, state) in enumerate(truth(name, n_calls)):
        outs = np.concatenate([result[i][0] for result in results], axis=1)
        errors += [worst_head(outs.swapaxes(1, 2), out.swapaxes(1, 2)), worst_head(results[-1][i][1], state)]
    stop_where_red(errors, limit)
    return call
