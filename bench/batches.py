"""Named workloads as peers take them: float32, fla's layout, q and k of length 1, one batch for every call."""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba import fused_recurrent_gated_delta_rule
from cgdr_numba.core import memory
from cgdr_numba.parity.cases import DECODES, WORKLOADS, make_decode, make_inputs

NAMES = ("q", "k", "v", "g", "beta", "state")
Array = NDArray[Any]
Batch = dict[str, Array]
"""q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g, beta [B, T, Hv] and state [B, Hv, Dk, Dv], each from a cache line on."""


def aligned(x: Array) -> Array:
    """Return a float32 copy that begins on a cache line: large NumPy arrays do not."""
    copy = memory.empty(x.shape, np.float32)
    copy[...] = x
    return copy


def make_batches(name: str) -> list[Batch]:
    """Return a workload's batches: one of a decode, and one with B = 1 for every packed sequence of a prefill."""
    if name in DECODES:
        inputs = make_decode(DECODES[name])
        unit = {n: x / np.sqrt((x * x).sum(-1, keepdims=True)) for n, x in inputs.items() if n in ("q", "k")}
        return [{n: aligned(x) for n, x in (inputs | unit).items()}]
    workload = WORKLOADS[name]
    inputs = make_inputs(workload, np.float32)
    states = inputs.pop("state").swapaxes(2, 3)
    ends = np.cumsum(workload.lengths)
    return [
        {n: aligned(x[np.newaxis, end - length : end]) for n, x in inputs.items()}
        | {"state": aligned(states[i : i + 1])}
        for i, (end, length) in enumerate(zip(ends, workload.lengths, strict=True))
    ]


@functools.cache
def truth(name: str, n_calls: int) -> list[tuple[Array, Array]]:
    """Return golden's (out, final state) of every batch, its tokens given n_calls times one after another."""
    results = []
    for batch in make_batches(name):
        wide = {n: x.astype(np.float64) for n, x in batch.items()}
        q, k, v, g, beta = (np.concatenate([wide[n]] * n_calls, axis=1) for n in NAMES[:-1])
        out, state = fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=wide["state"], output_final_state=True, backend="golden"
        )
        assert state is not None
        results.append((out, state))
    return results
