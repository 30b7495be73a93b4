"""Recorded calls in files: what is read, what is refused, what is written."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.errors import BudgetError, ContractError, DtypeError
from cgdr_numba.parity.calls import (
    RecordedCall,
    check_output,
    load_call,
    sample_call,
    save_call,
    save_results,
)
from cgdr_numba.parity.replays import compare, plan_call, replay
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import REVISION
from small_call import LENGTHS, entries, save_entries, small_call


def assert_same(one: RecordedCall, other: RecordedCall) -> None:
    """The calls agree in everything but their source, element by element and dtype by dtype."""
    for a, b in ((one.arrays, other.arrays), (one.expected, other.expected)):
        assert list(a) == list(b)
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert np.array_equal(a[name], b[name]), name
    assert (one.operator, one.scale, dict(one.metadata)) == (other.operator, other.scale, dict(other.metadata))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_saved_call_comes_back(tmp_path: Path, dtype: Any) -> None:
    call = replace(small_call(dtype), scale=1 / 3)
    path = tmp_path / "call.safetensors"
    save_call(path, call)
    loaded = load_call(path)
    assert_same(loaded, call)
    assert loaded.source == str(path)


@pytest.mark.parametrize("scale", [0.25, np.float32(0.1), 1, "0.0883883461356163"])
def test_npz_holds_the_same_call(tmp_path: Path, scale: Any) -> None:
    call = small_call()
    path = save_entries(tmp_path / "call.npz", {**entries(call), "scale": scale, "layout": b"TND", "tries": 3})
    expected = replace(call, scale=float(scale), metadata={**call.metadata, "tries": "3"})
    assert_same(load_call(path), expected)


def test_g_scale_and_references_may_be_missing(tmp_path: Path) -> None:
    kept = {name: x for name, x in entries(small_call()).items() if name not in ("g", "scale", "note")}
    kept = {name: x for name, x in kept.items() if not name.startswith("expected_")}
    call = load_call(save_entries(tmp_path / "call.safetensors", kept))
    assert (call.scale, "g" in call.arrays, dict(call.expected), dict(call.metadata)) == (None, False, {}, {})
    assert call.problem().scale == 1.0
    assert compare(call, *replay(call, "golden")) == {}


def test_strides_do_not_change_what_is_written(tmp_path: Path) -> None:
    call = small_call()
    strided = replace(
        call,
        arrays={name: np.asfortranarray(x) if x.ndim > 1 else np.repeat(x, 2)[::2] for name, x in call.arrays.items()},
        expected={name: x[..., ::-1].copy()[..., ::-1] for name, x in call.expected.items()},
    )
    assert not strided.arrays["value"].flags.c_contiguous
    assert not strided.expected["out"].flags.c_contiguous
    save_call(tmp_path / "plain.safetensors", call)
    save_call(tmp_path / "strided.safetensors", strided)
    assert_same(load_call(tmp_path / "strided.safetensors"), call)
    assert (tmp_path / "strided.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_metadata_is_written_in_order(tmp_path: Path) -> None:
    call = replace(small_call(), metadata=dict.fromkeys("zyxwvutsrqponmlkjihgfedcba", "é"))
    path = tmp_path / "call.safetensors"
    save_call(path, call)
    data = path.read_bytes()
    n_header = struct.unpack("<Q", data[:8])[0]
    names = list(json.loads(data[8 : 8 + n_header])["__metadata__"])
    assert names == sorted(names)
    assert n_header % 8 == 0
    assert_same(load_call(path), call)


WITHOUT: Any = object()
"""Stands for an entry that is left out."""
REFUSED = [
    ({"operator": WITHOUT}, "metadata must name the `operator`"),
    (
        {"operator": "npu_rule"},
        "must be 'npu_chunk_gated_delta_rule' or 'npu_recurrent_gated_delta_rule', got 'npu_rule'",
    ),
    ({"layout": "BNSD"}, "metadata `layout` must be 'TND', got 'BNSD'"),
    ({"state_layout": "N,Hv,Dk,Dv"}, "metadata `state_layout` must be 'N,Hv,Dv,Dk', got 'N,Hv,Dk,Dv'"),
    ({"seq_lens_format": "cumulative"}, "metadata `seq_lens_format` must be 'lengths', got 'cumulative'"),
    ({"scale": "many"}, "metadata `scale` must be a number, got 'many'"),
    ({"key": WITHOUT}, "lacks `key`; it holds `actual_seq_lengths`, `beta`, "),
    ({"gama": np.zeros((8, 2))}, "`gama` is no argument of npu_chunk_gated_delta_rule"),
    ({"value": np.zeros((8, 32), np.float16)}, r"`value` must be \[T, Hv, Dv\] \(3 axes\), got 2 axes: \[8, 32\]"),
    ({"key": np.zeros((8, 1, 15), np.float16)}, r"`key` must be \[T, Hk, Dk\] = \[8, 1, 16\], got \[8, 1, 15\]"),
    ({"beta": np.zeros((8, 2), np.int64)}, "`beta` must be float16, bfloat16, float32 or float64, got int64"),
    ({"key": np.zeros((8, 1, 16), np.float32)}, "`key` must have the dtype of `query`, float16, got float32"),
    ({"actual_seq_lengths": np.array([5, 0, 4])}, r"with the sum T = 8, got \[5, 0, 4\] with the sum 9"),
    ({"actual_seq_lengths": np.array([5.0, 0, 3])}, "`actual_seq_lengths` must hold integers, got float64"),
    ({"initial_state": np.zeros((2, 2, 32, 16))}, r"`initial_state` must be \[N, Hv, Dv, Dk\] = \[3, 2, 32, 16\]"),
    ({"expected_out": np.zeros((8, 2, 16))}, r"`expected_out` must be \[T, Hv, Dv\] = \[8, 2, 32\]"),
    ({"expected_out": np.zeros((8, 64))}, r"`expected_out` must be \[T, Hv, Dv\] \(3 axes\), got 2 axes"),
    ({"expected_out": np.zeros((8, 2, 32), np.int8)}, "`expected_out` must be float16, .* got int8"),
    ({"expected_final_state": np.zeros((3, 2, 16, 32))}, r"`expected_final_state` must be .* = \[3, 2, 32, 16\]"),
]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_wrong_contents_are_refused_in_a_line(tmp_path: Path, suffix: str, change: Any, message: str) -> None:
    values = {name: x for name, x in {**entries(small_call()), **change}.items() if x is not WITHOUT}
    path = save_entries(tmp_path / f"wrong{suffix}", values)
    with pytest.raises(ContractError, match=message) as caught:
        load_call(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def broken(path: Path, kind: str) -> Path:
    """Write a file that cannot be read, and return its path."""
    whole = save_entries(path.with_stem("whole"), entries(small_call())).read_bytes()
    contents = {"truncated": whole[:-7], "short": whole[:6], "empty": b"", "text": b"no tensors at all\n" * 20}
    path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize("kind", ["truncated", "short", "empty", "text"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_damaged_files_are_refused_in_a_line(tmp_path: Path, kind: str, suffix: str) -> None:
    path = broken(tmp_path / f"broken{suffix}", kind)
    with pytest.raises(
        ContractError, match=r"must be a complete (safetensors file|npz archive of plain arrays), got: ."
    ):
        load_call(path)


@pytest.mark.parametrize(
    ("save", "place", "reason"), [(np.savez, 200, "Bad CRC-32"), (np.savez_compressed, 0, "Error -3")]
)
def test_an_npz_with_damaged_contents_is_refused(tmp_path: Path, save: Any, place: int, reason: str) -> None:
    path = tmp_path / "damaged.npz"
    save(path, initial_state=np.arange(4000.0))
    data = bytearray(path.read_bytes())
    contents = 30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    data[contents + place] = 0xFF
    path.write_bytes(data)
    with pytest.raises(ContractError, match=f"must be a complete npz archive of plain arrays, got: {reason}"):
        load_call(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    for name, message in (
        ("none.safetensors", "there is no such file"),
        ("folder.npz", "is a folder, not a file"),
        ("call.pt", "must be a .safetensors or .npz file, got suffix '.pt'"),
    ):
        with pytest.raises(ContractError, match=f"{name}: .*{message}"):
            load_call(tmp_path / name)


def test_npz_refuses_bfloat16_with_advice(tmp_path: Path) -> None:
    path = save_entries(tmp_path / "call.npz", entries(small_call(ml_dtypes.bfloat16)))
    with pytest.raises(ContractError, match=r"`query` has 2-byte elements .* bfloat16: save the call as .safetensors"):
        load_call(path)


def test_npz_refuses_pickles_and_single_arrays(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, query=np.array([{}], dtype=object))
    with pytest.raises(ContractError, match="Object arrays cannot be loaded"):
        load_call(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ContractError, match="must be an npz archive, got a single array"):
        load_call(path)


def test_safetensors_refuses_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    header = json.dumps({"query": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "call.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    with pytest.raises(ContractError, match="`query` must have a dtype that NumPy has, got F8_E4M3"):
        load_call(path)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_golden_replays_unrounded(dtype: Any) -> None:
    call = small_call(dtype)
    before = {name: x.copy() for name, x in call.arrays.items()}
    out, state = replay(call, "golden")
    assert (out.dtype, state.dtype) == (np.float64, np.float64)
    errors = compare(call, out, state)
    assert all(found.worst <= 1e-7 for found in errors.values())
    assert np.isnan(errors["out"].relative_rms[1]).all()
    assert (errors["final_state"].relative_rms[1] <= 1e-7).all()
    assert all(np.array_equal(x, before[name]) for name, x in call.arrays.items())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_other_backends_replay_as_recorded(dtype: Any, backend: str) -> None:
    call = small_call(dtype)
    out, state = replay(call, backend)
    assert (out.dtype, state.dtype) == (dtype, dtype)
    bound = {np.float16: 4e-4, ml_dtypes.bfloat16: 4e-4 * 8, np.float32: 1e-6}[dtype]
    assert all(found.worst <= bound for found in compare(call, out, state).values())
    again = replay(call, backend, plan=plan_call(call, "host", backend=backend))
    assert np.array_equal(out, again[0])
    assert np.array_equal(state, again[1])


def test_replay_refuses_what_the_operator_refuses() -> None:
    with pytest.raises(ContractError, match='`backend` must be "fast" or "golden" or "faithful", got \'slow\''):
        replay(small_call(), "slow")
    with pytest.raises(ContractError, match="`target` must be left out"):
        replay(small_call(), "golden", target="310p")


def test_a_plan_is_made_for_the_recorded_sizes() -> None:
    plan = plan_call(small_call(), "310p", v_step=16)
    assert plan.key == (Dims(8, 3, 1, 2, 16, 32), LENGTHS, "float16")
    assert plan.tiling.v_step == 16
    for backend in ("fast", "faithful"):
        with pytest.raises(DtypeError, match="float64 query, key and value are golden's only"):
            plan_call(small_call(np.float64), backend=backend)
    host_plan = plan_call(small_call(), backend="fast")
    assert isinstance(host_plan, HostPlan)
    assert host_plan.key == (Dims(8, 3, 1, 2, 16, 32), LENGTHS)
    with pytest.raises(ContractError, match='`backend` must be "faithful" or "fast", got \'golden\''):
        plan_call(small_call(), backend="golden")
    with pytest.raises(BudgetError, match="no V tile fits"):
        plan_call(small_call(), replace(plan.device, ub_bytes=32768))


def test_results_are_written_with_what_made_them(tmp_path: Path) -> None:
    call = small_call()
    out, state = replay(call, "golden")
    path = tmp_path / "results.safetensors"
    assert not state.swapaxes(2, 3).flags.c_contiguous
    plans = {"golden": None, "fast": plan_call(call, backend="fast"), "faithful": plan_call(call)}
    for backend, plan in plans.items():
        save_results(path, call, (out, state.swapaxes(2, 3)), plan or backend)
        with safe_open(path, "numpy") as file:
            metadata = file.metadata()
            assert np.array_equal(file.get_tensor("out"), out)
            assert np.array_equal(file.get_tensor("final_state"), state.swapaxes(2, 3))
        assert metadata["operator"] == call.operator
        assert metadata["call"] == "small.safetensors"
        assert float(metadata["scale"]) == call.scale
        assert metadata["backend"] == backend
        assert metadata.get("revision") == (REVISION if backend == "faithful" else None)
        assert metadata.get("instruction_set") == (instruction_set().name if backend == "fast" else None)


def test_results_do_not_replace_the_call(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    save_call(path, small_call())
    call, before = load_call(path), path.read_bytes()
    results = replay(call, "golden")
    with pytest.raises(ContractError, match="must go into another file than the recorded call"):
        save_results(path, call, results, "golden")
    assert path.read_bytes() == before


def test_results_need_a_folder_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"out.npz: files are written as .safetensors, got suffix '.npz'"):
        check_output(tmp_path / "out.npz", small_call())
    with pytest.raises(ContractError, match=r"the folder to write into must exist, and there is no .*nowhere"):
        check_output(tmp_path / "nowhere" / "out.safetensors", small_call())
    check_output(tmp_path / "out.safetensors", small_call())


def test_the_sample_is_small_and_whole() -> None:
    call = sample_call()
    assert call.problem().dims == Dims(220, 2, 1, 2, 128, 128)
    assert call.problem().lengths == (150, 70)
    assert sorted(call.expected) == ["final_state", "out"]
    assert np.any(call.arrays["initial_state"][0] != 0)
    assert sum(x.nbytes for group in (call.arrays, call.expected) for x in group.values()) < 1_000_000
