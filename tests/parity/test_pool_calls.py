"""Recorded calls over a pool: what is read, refused, replayed, planned and written."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from safetensors import safe_open

from cgdr_numba.core.cache import cache_folder
from cgdr_numba.core.dims import Dims
from cgdr_numba.errors import ContractError, DtypeError, UnsupportedError
from cgdr_numba.ops import POOL_BACKENDS
from cgdr_numba.parity import runs
from cgdr_numba.parity.calls import load_call, sample_decode, save_call, save_results
from cgdr_numba.parity.metrics import bound_of
from cgdr_numba.parity.operators import RECURRENT_OPERATOR
from cgdr_numba.parity.replays import compare, plan_call, replay
from cgdr_numba.parity.runs import run_call, will_compile, worker_of
from cgdr_numba.sched.pool_plan import POOL_REVISION, PoolPlan
from small_call import POOL_LENGTHS, entries, save_entries, small_pool_call


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("gates", ["", "g vector", "scalar"])
def test_a_saved_call_comes_back(tmp_path: Path, dtype: Any, gates: str) -> None:
    call = small_pool_call(dtype, gates=gates, state=np.float32)
    save_call(tmp_path / "call.safetensors", call)
    loaded = load_call(tmp_path / "call.safetensors")
    for mine, theirs in ((loaded.arrays, call.arrays), (loaded.expected, call.expected)):
        assert sorted(mine) == sorted(theirs)
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert (loaded.scale, loaded.operator, loaded.seq_lens_format) == (0.25, RECURRENT_OPERATOR, "lengths")
    assert loaded.problem().dims == Dims(5, 3, 1, 2, 16, 32)


@pytest.mark.parametrize(
    ("form", "lengths"), [("lengths", POOL_LENGTHS), ("start+lengths", (0, *POOL_LENGTHS)), ("cu", (0, 3, 3, 5))]
)
def test_lengths_in_every_form(tmp_path: Path, form: str, lengths: tuple[int, ...]) -> None:
    call = small_pool_call()
    values = {**entries(call), "actual_seq_lengths": np.array(lengths), "seq_lens_format": form}
    loaded = load_call(save_entries(tmp_path / "call.npz", values))
    assert loaded.seq_lens_format == form
    assert loaded.problem().lengths == POOL_LENGTHS
    expected, actual = replay(call, "golden"), replay(loaded, "golden")
    assert all(np.array_equal(a, e) for a, e in zip(actual, expected, strict=True))
    save_call(tmp_path / "again.safetensors", loaded)
    assert load_call(tmp_path / "again.safetensors").seq_lens_format == form


WITHOUT: Any = object()
"""Stands for an entry that is left out."""
REFUSED = [
    ({"state": WITHOUT}, "lacks `state`; it holds `actual_seq_lengths`"),
    ({"ssm_state_indices": WITHOUT}, "lacks `ssm_state_indices`"),
    ({"initial_state": np.zeros((8, 2, 32, 16))}, "`initial_state` is no argument of npu_recurrent_gated_delta_rule"),
    ({"state_layout": "N,Hv,Dv,Dk"}, "metadata `state_layout` must be 'slots,Hv,Dv,Dk', got 'N,Hv,Dv,Dk'"),
    ({"seq_lens_format": "sums"}, r"`seq_lens_format` must be 'lengths' or 'start\+lengths' or 'cu', got 'sums'"),
    (
        {"ssm_state_indices": np.array([0, 1, 2, 3, 8])},
        "must be slots from 0 to 7, or -1 for padding, got 8 at token 4",
    ),
    ({"num_accepted_tokens": np.array([4, 0, 1])}, "from 1 to the sequence's length, 3, got 4 for sequence 0"),
    ({"read_indices": np.array([5, 5, 5])}, "`read_indices` excludes `num_accepted_tokens`, got both"),
    (
        {"expected_state": np.zeros((3, 2, 32, 16))},
        r"`expected_state` must be \[slots, Hv, Dv, Dk\] = \[8, 2, 32, 16\]",
    ),
    ({"expected_final_state": np.zeros((8, 2, 32, 16))}, "`expected_final_state` is no argument"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_wrong_contents_are_refused_in_a_line(tmp_path: Path, change: Any, message: str) -> None:
    values = {name: x for name, x in {**entries(small_pool_call()), **change}.items() if x is not WITHOUT}
    path = save_entries(tmp_path / "wrong.npz", values)
    with pytest.raises(ContractError, match=message) as caught:
        load_call(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", POOL_BACKENDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_replays_leave_the_recorded_pool_alone(backend: str, dtype: Any) -> None:
    call = small_pool_call(dtype, gates="g vector")
    before = {name: x.copy() for name, x in call.arrays.items()}
    out, pool = replay(call, backend)
    kind = np.dtype(np.float64 if backend == "golden" else dtype)
    assert (out.dtype, pool.dtype) == (kind, kind)
    assert all(np.array_equal(x, before[name]) for name, x in call.arrays.items())
    errors = compare(call, out, pool)
    assert errors["out"].relative_rms.shape == (3, 2)
    assert errors["state"].relative_rms.shape == (8, 2)
    assert np.isnan(errors["out"].relative_rms[1]).all(), "a sequence without tokens has no outputs"
    assert all(found.worst <= bound_of(out) for found in errors.values())


def test_padding_has_no_part_in_relative_rms() -> None:
    call = small_pool_call()
    slots = call.arrays["ssm_state_indices"].copy()
    slots[3:] = -1
    padded = replace(
        call,
        arrays={**call.arrays, "ssm_state_indices": slots, "actual_seq_lengths": np.array([3])}
        | {"num_accepted_tokens": call.arrays["num_accepted_tokens"][:1]},
    )
    found = compare(padded, *replay(padded, "golden"))["out"]
    assert found.relative_rms.shape == (1, 2)
    assert found.worst is not None
    assert found.worst <= 1e-6
    assert found.max_abs_at is not None
    assert found.max_abs_at[0] >= 3, "but its rows are zero, and the reference's are not"


def test_plans_of_calls_over_a_pool() -> None:
    plan = plan_call(small_pool_call(gates="vector"), "310p", 16)
    assert isinstance(plan, PoolPlan)
    assert (plan.key.dims, plan.key.lengths, plan.key.gates) == (Dims(5, 3, 1, 2, 16, 32), (3, 0, 2), (False, "vector"))
    assert plan.tiling.v_step == 16
    expected = replay(small_pool_call(gates="vector"), "faithful")
    for actual in (replay(small_pool_call(gates="vector"), "faithful", plan=plan),):
        assert all(np.array_equal(a, e) for a, e in zip(actual, expected, strict=True))
    with pytest.raises(UnsupportedError, match="a plan on faithful only, not on fast"):
        plan_call(small_pool_call(), backend="fast")
    with pytest.raises(DtypeError, match="float64 query, key and value are golden's only"):
        plan_call(small_pool_call(np.float64))
    with pytest.raises(DtypeError, match="a float64 state is golden's only"):
        plan_call(small_pool_call(state=np.float64))


def test_a_run_has_a_plan_times_and_bounds() -> None:
    run = run_call(small_pool_call(), "faithful")
    assert isinstance(run.plan, PoolPlan)
    assert {name: run.bound(name) for name in run.errors} == {"out": 4e-4, "state": 4e-4}
    assert not will_compile(RECURRENT_OPERATOR, "faithful")
    golden = run_call(small_pool_call(), "golden")
    assert (golden.plan, golden.compile_seconds) == (None, None)
    with pytest.raises(ContractError, match="`target` must be left out"):
        run_call(small_pool_call(), "golden", "310p")


def test_results_are_written_with_what_made_them(tmp_path: Path) -> None:
    call, path = small_pool_call(), tmp_path / "results.safetensors"
    results = replay(call, "faithful")
    for made_by, backend in ((plan_call(call), "faithful"), ("golden", "golden")):
        save_results(path, call, results, made_by)
        with safe_open(path, "numpy") as file:
            metadata = file.metadata()
            assert sorted(file.keys()) == ["out", "state"]
            assert np.array_equal(file.get_tensor("state"), results[1])
        assert metadata["backend"] == backend
        assert metadata["state_layout"] == "slots,Hv,Dv,Dk"
        assert metadata.get("revision") == (POOL_REVISION if backend == "faithful" else None)


def test_the_shipped_decode_is_small_and_whole() -> None:
    call = sample_decode()
    assert call.problem().dims == Dims(3, 2, 1, 1, 128, 128)
    assert call.arrays["num_accepted_tokens"].tolist() == [1, 2]
    assert sum(x.nbytes for group in (call.arrays, call.expected) for x in group.values()) < 500_000


def test_calls_with_gates_of_channels_have_a_worker_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept kernel of calls without them is of no use, and is not waited for."""
    assert small_pool_call(gates="vector").has_channels
    assert not any(small_pool_call(gates=gates).has_channels for gates in ("g", "scalar"))

    plain, channels = (worker_of(RECURRENT_OPERATOR, "fast", has_channels) for has_channels in (False, True))
    assert plain is not None
    assert channels is not None
    assert worker_of(RECURRENT_OPERATOR, "faithful", True) is worker_of(RECURRENT_OPERATOR, "faithful")
    # These stand for workers that nothing has called in this process.
    fresh = [SimpleNamespace(compile_seconds=None, kept_as=worker.kept_as) for worker in (plain, channels)]
    monkeypatch.setattr(runs, "WORKERS", {RECURRENT_OPERATOR: {"fast": fresh[0]}})
    monkeypatch.setattr(runs, "CHANNEL_WORKER", fresh[1])
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    folder.mkdir()
    for worker, has_channels in ((plain, False), (channels, True)):
        kept = folder / worker.kept_as.replace("*", "0.py311")
        kept.touch()
        assert not will_compile(RECURRENT_OPERATOR, "fast", has_channels)
        assert will_compile(RECURRENT_OPERATOR, "fast", not has_channels)
        kept.unlink()
