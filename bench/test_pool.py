"""Decode through a pool of states, beside the plain recurrent function: ``pytest bench --benchmark-enable``."""

from typing import Any

import numpy as np
import pytest

from batches import NAMES, aligned
from cgdr_numba import fused_recurrent_gated_delta_rule, npu_recurrent_gated_delta_rule
from cgdr_numba.core import memory
from cgdr_numba.parity.cases import DECODES, Decode, make_decode
from gate import FP32_RMS, stop_where_red, worst_head
from threads import on_threads
from turns import Turns

Inputs = dict[str, Any]


def unit(x: Any) -> Any:
    """Return x with vectors of length 1."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def decode_inputs(decode: Decode) -> Inputs:
    """Return a decode's tensors, q and k of length 1 and states V first."""
    inputs = make_decode(decode)
    inputs |= {n: unit(inputs[n]) for n in ("q", "k")}
    inputs["state"] = inputs["state"].swapaxes(2, 3)
    return {n: aligned(x) for n, x in inputs.items()}


def pooled(inputs: Inputs) -> Inputs:
    """Return the same without a batch axis, as the pool's function takes them: a slot for every sequence."""
    n_sequences, n_tokens = inputs["q"].shape[:2]
    query, key, value, g, beta = (inputs[n].reshape(-1, *inputs[n].shape[2:]) for n in NAMES[:-1])
    return {
        "query": query,
        "key": key,
        "value": value,
        "g": g,
        "beta": beta,
        "scale": query.shape[-1] ** -0.5,
        "actual_seq_lengths": np.full(n_sequences, n_tokens),
        "ssm_state_indices": np.repeat(np.arange(n_sequences), n_tokens),
    }


def stop_where_the_pool_is_red(inputs: Inputs) -> None:
    """Compare the first sequence's first heads with golden."""
    heads = {n: x[:1, :, : 1 if n in ("q", "k") else 2] for n, x in inputs.items() if n != "state"}
    results = []
    for backend, dtype in (("golden", np.float64), ("fast", np.float32)):
        pool = inputs["state"][:1, :2].astype(dtype)
        call = pooled({n: x.astype(dtype) for n, x in heads.items()})
        results.append((npu_recurrent_gated_delta_rule(state=pool, backend=backend, **call), pool))
    errors = [worst_head(actual, expected) for actual, expected in zip(results[1], results[0], strict=True)]
    stop_where_red(errors, FP32_RMS)


def time_beside(benchmark: Any, plain: Any, ours: Any, threads: int, block: int) -> None:
    """Time the second by rounds of a benchmark, the first in turns with it; show the ratio."""
    turns = Turns(plain, ours, block)
    benchmark.pedantic(ours, setup=turns, rounds=4 * block)
    if benchmark.enabled:
        benchmark.extra_info |= {
            "threads": threads,
            "plain, ms": round(turns.ours * 1e3, 4),
            "times the plain function": round(benchmark.stats.stats.median / turns.ours, 3),
        }


@pytest.mark.benchmark(group="pool beside fused_recurrent_gated_delta_rule")
@on_threads
@pytest.mark.parametrize("slots", ["one a sequence", "one a token"])
@pytest.mark.parametrize("name", list(DECODES))
def test_decode(benchmark: Any, name: str, slots: str, threads: int) -> None:
    inputs = decode_inputs(DECODES[name])
    stop_where_the_pool_is_red(inputs)
    q, k, v, g, beta, state = (inputs[n] for n in NAMES)
    call, pool = pooled(inputs), aligned(state)
    if slots == "one a token":
        n_tokens = len(call["query"])
        if n_tokens == len(state):
            pytest.skip("the same as one a sequence")
        call["ssm_state_indices"], pool = np.arange(n_tokens), aligned(np.repeat(state, n_tokens // len(state), axis=0))
    plain = {"g": g, "beta": beta, "initial_state": state, "out_state": state, "state_v_first": True}
    time_beside(
        benchmark,
        lambda: fused_recurrent_gated_delta_rule(q, k, v, threads=threads, **plain),
        lambda: npu_recurrent_gated_delta_rule(state=pool, backend="fast", threads=threads, **call),
        threads,
        50 if name == "D1" else 5,
    )


@pytest.mark.benchmark(group="16 sequences over pools")
@pytest.mark.parametrize("n_slots", [16, 4096])
def test_slots_that_are_not_named_cost_nothing(benchmark: Any, n_slots: int) -> None:
    inputs = decode_inputs(Decode("16 sequences", 16, 1, 4, 8, 64, 64))
    call = pooled(inputs)
    pool = memory.empty((n_slots, *inputs["state"].shape[1:]), np.float32)
    pool[...] = inputs["state"][0]
    call["ssm_state_indices"] = np.random.default_rng(0).permutation(n_slots)[:16]
    benchmark.pedantic(
        npu_recurrent_gated_delta_rule,
        kwargs={"state": pool, "backend": "fast", "threads": 1, **call},
        rounds=300,
        warmup_rounds=20,
    )
