"""Channels that forget one by one, beside heads that forget as a whole: ``pytest bench --benchmark-enable``."""

from typing import Any

import numpy as np
import pytest

from batches import NAMES, aligned
from cgdr_numba import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from cgdr_numba.parity.cases import DECODES, WORKLOADS, make_decode, make_inputs
from gate import FP32_RMS, stop_where_red, worst_head
from threads import on_threads
from turns import Turns

TENSORS = NAMES[:-1]
Inputs = dict[str, Any]


def with_channels(inputs: Inputs, seed: int) -> Inputs:
    """Add gk: every channel of a head forgets at its own pace, e^N(0, 1) times the head's."""
    paces = np.exp(np.random.default_rng(seed).standard_normal((inputs["g"].shape[2], inputs["q"].shape[3])))
    return {**inputs, "gk": aligned(inputs["g"][..., np.newaxis] * paces)}


def prefill(name: str) -> tuple[Inputs, Inputs]:
    """Return a workload's tensors, float32 in fla's layout, and the options of its calls."""
    workload = WORKLOADS[name]
    packed = make_inputs(workload, np.float32)
    inputs = {n: aligned(packed[n][np.newaxis]) for n in TENSORS}
    options = {
        "initial_state": aligned(packed["state"].swapaxes(2, 3)),
        "output_final_state": True,
        "cu_seqlens": [0, *np.cumsum(workload.lengths).tolist()],
    }
    return with_channels(inputs, 1), options


def stop_where_channels_are_red(function: Any, inputs: Inputs, options: Inputs) -> None:
    """Compare the first key head's value heads with golden."""
    group = inputs["v"].shape[2] // inputs["q"].shape[2]
    few = {n: x[:, :, : 1 if n in ("q", "k") else group] for n, x in inputs.items()}
    few_options = {**options, "initial_state": options["initial_state"][:, :group]}
    wide = {n: x.astype(np.float64) for n, x in few.items()}
    results = []
    for backend, given in (("golden", wide), ("fast", few)):
        q, k, v, gk, beta = (given[n] for n in ("q", "k", "v", "gk", "beta"))
        results.append(function(q, k, v, gk, beta, backend=backend, **few_options))
    (out, state), (fast_out, fast_state) = results
    errors = [worst_head(fast_out.swapaxes(1, 2), out.swapaxes(1, 2)), worst_head(fast_state, state)]
    stop_where_red(errors, FP32_RMS)


def time_beside(benchmark: Any, theirs: Any, ours: Any, threads: int, block: int) -> None:
    """Time the second by rounds of a benchmark, the first in turns with it; show the ratio."""
    turns = Turns(theirs, ours, block)
    benchmark.pedantic(ours, setup=turns, rounds=3 * block)
    if benchmark.enabled:
        benchmark.extra_info |= {
            "threads": threads,
            "scalar gate, ms": round(turns.ours * 1e3, 4),
            "times the scalar gate": round(benchmark.stats.stats.median / turns.ours, 2),
        }


@pytest.mark.benchmark(group="chunk_kda beside chunk_gated_delta_rule")
@on_threads
@pytest.mark.parametrize("name", ["P1", "P2", "P3", "P4"])
def test_prefill(benchmark: Any, name: str, threads: int) -> None:
    inputs, options = prefill(name)
    stop_where_channels_are_red(chunk_kda, inputs, options)
    q, k, v, g, beta, gk = (inputs[n] for n in (*TENSORS, "gk"))
    time_beside(
        benchmark,
        lambda: chunk_gated_delta_rule(q, k, v, g, beta, threads=threads, **options),
        lambda: chunk_kda(q, k, v, gk, beta, threads=threads, **options),
        threads,
        15 if name == "P1" else 3,
    )


@pytest.mark.benchmark(group="fused_recurrent_kda beside fused_recurrent_gated_delta_rule")
@on_threads
@pytest.mark.parametrize("name", list(DECODES))
def test_decode(benchmark: Any, name: str, threads: int) -> None:
    made = make_decode(DECODES[name])
    state, other = aligned(made["state"]), aligned(made["state"])
    inputs = with_channels({n: made[n] for n in TENSORS}, 2)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    stop_where_channels_are_red(fused_recurrent_kda, inputs, {**options, "initial_state": state})
    q, k, v, g, beta, gk = (inputs[n] for n in (*TENSORS, "gk"))
    options = {"use_qk_l2norm_in_kernel": True, "threads": threads}
    time_beside(
        benchmark,
        lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=other, out_state=other, **options
        ),
        lambda: fused_recurrent_kda(q, k, v, gk, beta, initial_state=state, out_state=state, **options),
        threads,
        50 if name == "D1" else 5,
    )
