"""Replays of calls that were recorded from a trained model, against the float64 results recorded beside them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from cgdr_numba import chunk_gated_delta_rule
from cgdr_numba.ops import POOL_BACKENDS
from cgdr_numba.parity.calls import RecordedCall, load_call, sample_call, sample_decode
from cgdr_numba.parity.metrics import bound_of, compare_out, compare_state
from cgdr_numba.parity.replays import compare, replay
from small_call import DATA

BACKENDS = ["fast", "golden", pytest.param("faithful", marks=pytest.mark.slow)]


def assert_within_bounds(call: RecordedCall, backend: str, results: tuple[str, ...]) -> None:
    """Every recorded result holds at its worst (sequence, head)."""
    out, final_state = replay(call, backend)
    errors = compare(call, out, final_state)
    assert tuple(errors) == results
    bounds = {"out": bound_of(out), "final_state": bound_of(final_state)}
    assert set(bounds.values()) == {1e-6 if backend == "golden" else 4e-4}
    for name, found in errors.items():
        assert np.isfinite(found.relative_rms).all()
        assert found.worst is not None
        assert found.worst <= bounds[name], (name, found.worst, found.worst_at)


@pytest.mark.parametrize("backend", BACKENDS)
def test_t092_the_shipped_sample(backend: str) -> None:
    assert_within_bounds(sample_call(), backend, ("out", "final_state"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "results"), [("packed_one_head", ("out", "final_state")), ("layer0_prefix", ("out",))]
)
def test_t092_committed_calls(name: str, results: tuple[str, ...], backend: str) -> None:
    assert_within_bounds(load_call(DATA / f"{name}.safetensors"), backend, results)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fast", "golden", "faithful"])
@pytest.mark.parametrize("name", ["tiny_packed", "tiny_layer0", "tiny_layer1"])
def test_t092_full_calls(shared_data: Path, name: str, backend: str) -> None:
    assert_within_bounds(load_call(shared_data / f"{name}.safetensors"), backend, ("out", "final_state"))


def assert_decoded(call: RecordedCall, backend: str) -> None:
    """Outputs and pool keep the bound of their dtype; the slots that no token names keep every bit."""
    before = call.arrays["state"].copy()
    out, pool = replay(call, backend)
    np.testing.assert_array_equal(call.arrays["state"], before)
    errors = compare(call, out, pool)
    assert list(errors) == ["out", "state"]
    for name, found in errors.items():
        assert found.worst is not None
        assert found.worst <= (1e-6 if backend == "golden" else 4e-4), (name, found.worst, found.worst_at)
    untouched = np.setdiff1d(np.arange(len(pool)), call.arrays["ssm_state_indices"])
    assert len(untouched)
    np.testing.assert_array_equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("backend", POOL_BACKENDS)
def test_the_shipped_decode(backend: str) -> None:
    assert_decoded(sample_decode(), backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", POOL_BACKENDS)
def test_the_full_decode(shared_data: Path, backend: str) -> None:
    assert_decoded(load_call(shared_data / "tiny_decode.safetensors"), backend)


def test_the_shipped_decode_is_a_cut_of_the_full_call(shared_data: Path) -> None:
    sample, full = sample_decode(), load_call(shared_data / "tiny_decode.safetensors")
    tokens = [0, 5, 6]
    assert np.array_equal(sample.arrays["value"], full.arrays["value"][tokens, 2:3])
    slots, full_slots = sample.arrays["ssm_state_indices"], full.arrays["ssm_state_indices"][tokens]
    for name in ("state", "actual_seq_lengths"):
        assert len(sample.arrays[name]) == {"state": 4, "actual_seq_lengths": 2}[name]
    assert np.array_equal(sample.arrays["state"][slots], full.arrays["state"][full_slots, 2:3])
    assert np.array_equal(sample.expected["state"][slots], full.expected["state"][full_slots, 2:3])


def test_the_sample_is_a_cut_of_the_full_call(shared_data: Path) -> None:
    sample, full = sample_call(), load_call(shared_data / "tiny_packed.safetensors")
    assert np.array_equal(sample.arrays["query"], full.arrays["query"][:220, :1])
    assert np.array_equal(sample.arrays["g"], full.arrays["g"][:220, :2])
    assert np.array_equal(sample.arrays["initial_state"], full.arrays["initial_state"][:2, :2])
    assert np.array_equal(sample.expected["final_state"], full.expected["final_state"][:2, :2])


class Decode(NamedTuple):
    """A recorded call of the recurrent operator: tensors by token, a pool of states, references."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    beta: NDArray[Any]
    g: NDArray[Any]
    state: NDArray[Any]
    """Pool [slots, Hv, Dv, Dk]."""
    actual_seq_lengths: NDArray[Any]
    num_accepted_tokens: NDArray[Any]
    ssm_state_indices: NDArray[Any]
    """Slot that the state after each token goes to."""
    expected_out: NDArray[Any]
    expected_state: NDArray[Any]


@pytest.fixture
def decode(shared_data: Path) -> tuple[Decode, float]:
    """The recorded recurrent call and its scale."""
    with safe_open(shared_data / "tiny_decode.safetensors", "numpy") as file:
        assert file.metadata()["state_layout"] == "slots,Hv,Dv,Dk"
        return Decode(*(file.get_tensor(name) for name in Decode._fields)), float(file.metadata()["scale"])


def run_token_by_token(
    call: Decode, scale: float, backend: Any, carried: Any
) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
    """Decode with one chunk call a token; every state goes into its token's slot, in dtype `carried`.

    A sequence starts from the slot of its last accepted token. Returns outputs, pool and the slots written.
    """
    out = np.full(call.value.shape, np.nan)
    pool = call.state.astype(carried)
    written = []
    begin = 0
    for length, accepted in zip(call.actual_seq_lengths, call.num_accepted_tokens, strict=True):
        state = pool[[call.ssm_state_indices[begin + accepted - 1]]]
        for t in range(begin, begin + length):
            token = (x[np.newaxis, t : t + 1] for x in call[:3])
            o, final = chunk_gated_delta_rule(
                *token,
                call.g[np.newaxis, t : t + 1],
                call.beta[np.newaxis, t : t + 1],
                backend=backend,
                scale=scale,
                initial_state=state,
                output_final_state=True,
                state_v_first=True,
            )
            assert final is not None
            assert final.dtype == carried
            out[t], state = o[0, 0], final
            pool[call.ssm_state_indices[t]] = final[0]
            written.append(int(call.ssm_state_indices[t]))
        begin += length
    return out, pool, written


def assert_pool(call: Decode, pool: NDArray[Any], written: list[int], bound: float) -> None:
    """Written slots agree with the recorded pool, all others are as they were."""
    found = compare_state(pool, call.expected_state)
    assert found.worst is not None
    assert found.worst <= bound, (found.worst, found.worst_at)
    untouched = sorted(set(range(len(pool))) - set(written))
    assert len(untouched) == len(pool) - len(call.query)
    assert np.array_equal(pool[untouched], call.state[untouched])


def test_recorded_decode_by_golden(decode: tuple[Decode, float]) -> None:
    call, scale = decode
    wide = call._replace(**{name: getattr(call, name).astype(np.float64) for name in ("query", "key", "value")})
    out, pool, written = run_token_by_token(wide, scale, "golden", np.float64)
    found = compare_out(out, call.expected_out, call.actual_seq_lengths.tolist())
    assert found.worst is not None
    assert found.worst <= 1e-6, (found.worst, found.worst_at)
    assert_pool(call, pool, written, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_recorded_decode_by_float32(decode: tuple[Decode, float], backend: str) -> None:
    call, scale = decode
    out, pool, written = run_token_by_token(call, scale, backend, np.float32)
    found = compare_out(out, call.expected_out, call.actual_seq_lengths.tolist())
    assert found.worst is not None
    assert found.worst <= 4e-4, (found.worst, found.worst_at)
    assert_pool(call, pool, written, 1e-5)


def test_the_decode_starts_from_the_accepted_slot(decode: tuple[Decode, float]) -> None:
    call, scale = decode
    wide = call._replace(**{name: getattr(call, name).astype(np.float64) for name in ("query", "key", "value")})
    all_accepted = wide._replace(num_accepted_tokens=call.actual_seq_lengths)
    out, _, _ = run_token_by_token(all_accepted, scale, "golden", np.float64)
    found = compare_out(out, call.expected_out, call.actual_seq_lengths.tolist())
    differ = call.actual_seq_lengths != call.num_accepted_tokens
    assert ((found.relative_rms.max(axis=1) > 1e-3) == differ).all()
