"""How fast decode runs, beside what the machine allows and beside peers: ``pytest bench --benchmark-enable``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batches import NAMES, Batch
from cgdr_numba import RecurrentStep, fused_recurrent_gated_delta_rule
from cgdr_numba.core.memory import empty
from cgdr_numba.parity.cases import DECODES, Decode, make_decode
from gate import FP32_RMS, admit, stop_where_red, worst_head
from peers import DECODE_PEERS, Call, Peer
from threads import on_threads
from turns import Turns
from yardsticks import fma_rate, read_modify_write


def checked(decode: Decode) -> dict[str, Any]:
    """Return a decode's inputs, or skip the benchmark where its parity is red."""
    inputs = make_decode(decode)
    q, k, v, g, beta, state = (inputs[name][:1] for name in NAMES)
    wide = [x.astype(np.float64) for x in (q, k, v, g, beta, state)]
    results = []
    for (q, k, v, g, beta, state), backend in ((wide, "golden"), ([x.astype(np.float32) for x in wide], "fast")):
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        results.append(fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, backend=backend, **options))
    errors = [
        worst_head(x.swapaxes(1, 2) if i == 0 else x, t.swapaxes(1, 2) if i == 0 else t)
        for i, (x, t) in enumerate(zip(results[1], results[0], strict=True))
    ]
    stop_where_red(errors, FP32_RMS)
    return inputs


@pytest.mark.benchmark(group="decode")
@on_threads
@pytest.mark.parametrize("state_v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("name", list(DECODES))
def test_prepared_step(benchmark: Any, name: str, state_v_first: bool, threads: int) -> None:
    decode = DECODES[name]
    *arrays, state = (checked(decode)[n] for n in NAMES)
    if state_v_first:
        turned = empty(state.swapaxes(2, 3).shape, np.float32)
        turned[:] = state.swapaxes(2, 3)
        state = turned
    options = {"use_qk_l2norm_in_kernel": True, "threads": threads, "state_v_first": state_v_first}
    step = RecurrentStep(*arrays, state, **options)
    floor = decode.flops / (fma_rate() * threads)
    in_place = read_modify_write(decode.state_bytes, threads)
    benchmark.pedantic(step, (*arrays, state), rounds=200 if name == "D1" else 40, warmup_rounds=5)
    if benchmark.enabled:
        median = benchmark.stats.stats.median
        benchmark.extra_info |= {
            "threads": threads,
            "flops": decode.flops,
            "state_bytes": decode.state_bytes,
            "times 3 FMA an element": round(median / floor, 3),
            "times in-place read and write": round(median / in_place, 3),
        }


def prepare_step(batches: Sequence[Batch], n_threads: int) -> Call:
    """Prepare ours in the form of a peer."""
    (batch,) = batches
    arrays = [batch[n] for n in NAMES]
    step = RecurrentStep(*arrays, threads=n_threads)
    return lambda: [(step(*arrays), arrays[-1])]


@pytest.mark.benchmark(group="decode beside peers")
@pytest.mark.parametrize("peer", DECODE_PEERS, ids=str)
@on_threads
@pytest.mark.parametrize("name", list(DECODES))
def test_peer(benchmark: Any, name: str, threads: int, peer: Peer) -> None:
    theirs = admit(peer, name, threads, FP32_RMS, n_calls=2)
    ours = admit(Peer("RecurrentStep", prepare_step), name, threads, FP32_RMS, n_calls=2)
    block = 50 if name == "D1" else 5
    turns = Turns(ours, theirs, block)
    benchmark.pedantic(theirs, setup=turns, rounds=4 * block)
    if benchmark.enabled:
        ratio = benchmark.stats.stats.median / turns.ours
        benchmark.extra_info |= {
            "threads": threads,
            "ours, ms": round(turns.ours * 1e3, 4),
            "ours, preempted": turns.n_preempted,
            "times ours": round(ratio, 2),
        }


@pytest.mark.benchmark(group="overhead")
@pytest.mark.parametrize("prepared", [False, True])
def test_call_of_one_narrow_head(benchmark: Any, prepared: bool) -> None:
    inputs = make_decode(Decode("narrow", 1, 1, 1, 1, 16, 16))
    arrays = [inputs[n] for n in NAMES]
    if prepared:
        benchmark.pedantic(RecurrentStep(*arrays, threads=1), arrays, rounds=2000, warmup_rounds=20)
        return
    q, k, v, g, beta, state = arrays
    options = {"g": g, "beta": beta, "initial_state": state, "out_state": state, "threads": 1}
    benchmark.pedantic(fused_recurrent_gated_delta_rule, (q, k, v), options, rounds=2000, warmup_rounds=20)
