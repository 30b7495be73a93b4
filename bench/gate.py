"""The gate in front of every benchmark: a run against golden."""

from typing import Any

import numpy as np

from cgdr_numba import npu_chunk_gated_delta_rule
from cgdr_numba.parity.cases import Workload

FP16_RMS = 4e-4
"""Largest relative rms of a head that still counts as right for float16 results."""


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
