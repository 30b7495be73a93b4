"""`cgdr run`: what it prints, writes and refuses."""

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from safetensors import safe_open

from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.core.threads import current_threads
from cgdr_numba.ops import BACKENDS
from cgdr_numba.parity.calls import load_call, save_call
from cgdr_numba.parity.metrics import bound_of
from cgdr_numba.parity.replays import replay
from cgdr_numba.sched.device import usable_cores
from cgdr_numba.sched.plan import REVISION
from commands import Answer, cgdr, refused
from small_call import LENGTHS, entries, save_entries, small_call


def test_small_call_by_golden(call_path: Path) -> None:
    text = cgdr("run", call_path, "--backend", "golden").out
    assert f"{call_path}: npu_chunk_gated_delta_rule\nnote: a small call\n" in text
    assert "8 tokens in 3 sequence(s) (5, 0, 3), Hk 1, Hv 2, Dk 16, Dv 32, float16, state float16, scale 0.25" in text
    assert "golden: no plan" in text


def test_an_empty_sequence_has_a_state_and_no_output(call_path: Path) -> None:
    rows = [line.split() for line in cgdr("run", call_path, "--backend", "golden").out.splitlines()]
    heads = {tuple(row[:3]): row[3:] for row in rows if len(row) == 5 and row[0].isdigit()}
    assert list(heads) == [(str(n), str(t), str(h)) for n, t in enumerate(LENGTHS) for h in (0, 1)]
    assert [errors[0] == "-" for errors in heads.values()] == [False, False, True, True, False, False]
    assert all(0 <= float(errors[1]) <= 1e-6 for errors in heads.values())


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_without_tokens(tmp_path: Path, lengths: tuple[int, ...], backend: str) -> None:
    path = tmp_path / "empty.safetensors"
    call = small_call(lengths=lengths)
    save_call(path, call)
    errors = cgdr("run", path, "--backend", backend, "--json").json["errors"]
    assert errors["out"]["worst"] is None
    assert errors["out"]["relative_rms"] == [[None, None]] * len(lengths)
    assert (errors["final_state"]["worst"] or 0.0) <= bound_of(call.arrays["initial_state"])
    assert "0 tokens in" in cgdr("run", path, "--backend", backend).out


def test_json_by_golden(call_path: Path) -> None:
    values = cgdr("run", call_path, "--backend", "golden", "--json").json
    assert (values["backend"], values["plan"], values["revision"], values["output"]) == ("golden", None, None, None)
    assert (values["lengths"], values["scale"], values["dtype"]) == (list(LENGTHS), 0.25, "float16")
    found = values["errors"]["out"]
    assert 0 < found["worst"] <= 1e-6
    assert found["relative_rms"][1] == [None, None]
    n, h = found["worst_at"]
    assert found["relative_rms"][n][h] == found["worst"]
    assert values["seconds"] > 0


def test_json_by_faithful(call_path: Path) -> None:
    values = cgdr("run", call_path, "--json").json
    assert (values["backend"], values["revision"]) == ("faithful", REVISION)
    assert values["plan"]["v_step"] == 32
    assert values["plan"]["device"]["name"] == "310p"
    assert all(found["worst"] <= 4e-4 for found in values["errors"].values())
    host = cgdr("run", call_path, "--target", "host", "--json").json
    assert host["plan"]["device"]["name"] == "host"
    assert host["errors"] == values["errors"]


def test_json_by_fast(call_path: Path) -> None:
    values = cgdr("run", call_path, "--backend", "fast", "--json").json
    assert (values["backend"], values["revision"]) == ("fast", None)
    plan = values["plan"]
    assert (plan["backend"], plan["threads"], plan["lengths"]) == ("fast", current_threads(), list(LENGTHS))
    assert all(found["worst"] <= 4e-4 for found in values["errors"].values())
    assert (values["compile_seconds"] is None) == bool(numba.config.DISABLE_JIT)
    host = cgdr("run", call_path, "--backend", "fast", "--target", "host", "--json").json
    assert host["plan"]["threads"] == usable_cores()
    assert host["errors"] == values["errors"]


def test_small_call_by_fast(call_path: Path) -> None:
    text = cgdr("run", call_path, "--backend", "fast").out
    assert f"bin(s) for {current_threads()} thread(s), balance " in text
    assert f"\ninstruction set {instruction_set().name}\n" in text
    assert "vector revision" not in text


def test_infinite_errors_stay_json(tmp_path: Path) -> None:
    call = small_call()
    call.expected["out"][0, 1, 2] = np.nan
    path = tmp_path / "nan.safetensors"
    save_call(path, call)
    found = cgdr("run", path, "--backend", "golden", "--json").json["errors"]["out"]
    assert (found["worst"], found["worst_at"], found["max_abs"], found["expected"]) == ("inf", [0, 1], "inf", "nan")
    assert "inf" in cgdr("run", path, "--backend", "golden").out


def test_a_call_without_references(tmp_path: Path) -> None:
    kept = {name: x for name, x in entries(small_call()).items() if not name.startswith("expected_")}
    path = save_entries(tmp_path / "call.npz", {name: x for name, x in kept.items() if name != "scale"})
    text = cgdr("run", path, "--backend", "golden").out
    assert "nothing to compare with" in text
    assert "scale 1 (the operator's default)" in text


def test_only_the_largest_errors_of_many_heads_are_listed(tmp_path: Path) -> None:
    lengths = (1,) * 40
    path = tmp_path / "many.safetensors"
    call = small_call(lengths=lengths)
    call.expected["out"][33, 1] += 1
    save_call(path, call)
    text = cgdr("run", path, "--backend", "golden").out
    assert "The 24 largest of 80 (sequence, head), by relative rms:" in text
    rows = [line.split() for line in text.partition("largest of 80")[2].splitlines()[2:]]
    assert len(rows) == 24
    assert rows[0][:3] == ["33", "1", "1"]
    assert "(1, 1, 1, 1, 1, 1, 1, 1, ...)" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_written(call_path: Path, tmp_path: Path, backend: str) -> None:
    target = tmp_path / "out.safetensors"
    answer = cgdr("run", call_path, "--backend", backend, "-o", target)
    assert f"wrote {target}: out [8, 2, 32], final_state [3, 2, 32, 16]" in answer.out
    out, state = replay(load_call(call_path), backend)
    with safe_open(target, "numpy") as file:
        assert sorted(file.keys()) == ["final_state", "out"]
        assert np.array_equal(file.get_tensor("out"), out)
        assert file.get_tensor("out").dtype == out.dtype
        assert np.array_equal(file.get_tensor("final_state"), state)
        metadata = file.metadata()
    assert (metadata["backend"], metadata["call"]) == (backend, "call.safetensors")
    assert metadata.get("instruction_set") == (instruction_set().name if backend == "fast" else None)
    assert metadata.get("revision") == (REVISION if backend == "faithful" else None)
    first = target.read_bytes()
    assert cgdr("run", call_path, "--backend", backend, "-o", target, "--json").json["output"] == str(target)
    assert target.read_bytes() == first


def test_what_cannot_be_read_is_refused_in_a_line(call_path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.safetensors"
    assert refused("run", missing) == f"cgdr: {missing}: there is no such file\n"
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(call_path.read_bytes()[:-100])
    assert f"{truncated}: must be a complete safetensors file, got: " in refused("run", truncated)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": np.zeros((8, 1, 15), np.float16)}, "`key` must be [T, Hk, Dk] = [8, 1, 16], got [8, 1, 15]"),
        ({"query": np.zeros((8, 16), np.float16)}, "`query` must be [T, Hk, Dk] (3 axes), got 2 axes: [8, 16]"),
        ({"operator": "npu_rule"}, "or 'npu_recurrent_gated_delta_rule', got 'npu_rule'"),
        ({"operator": "npu_recurrent_gated_delta_rule"}, "and lacks `state`, `ssm_state_indices`"),
    ],
)
def test_wrong_calls_are_refused_in_a_line(tmp_path: Path, change: Any, message: str) -> None:
    path = save_entries(tmp_path / "wrong.safetensors", {**entries(small_call()), **change})
    line = refused("run", path)
    assert line.startswith(f"cgdr: {path}: ")
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "slow"), '`backend` must be "fast" or "golden" or "faithful", got \'slow\''),
        (("--backend", "fast", "--target", "910b"), "got '910b' (the 910B's kernel is another one)"),
        (("--backend", "golden", "--target", "310p"), "`target` must be left out"),
        (("--target", "910b"), "got '910b' (the 910B's kernel is another one)"),
        (("-o", "out.npz"), "out.npz: files are written as .safetensors, got suffix '.npz'"),
        (("-o", "/no/such/folder/out.safetensors"), "there is no /no/such/folder"),
    ],
)
def test_wrong_options_are_refused_in_a_line(call_path: Path, options: Any, message: str) -> None:
    line = refused("run", call_path, *options)
    assert message in line
    answer = Answer(("run", call_path, *options, "--json"))
    assert (answer.code, answer.err) == (1, line)
    assert answer.json == {"error": line.removeprefix("cgdr: ").rstrip("\n")}


def test_the_call_is_not_overwritten(call_path: Path) -> None:
    before = call_path.read_bytes()
    assert "must go into another file" in refused("run", call_path, "-o", call_path)
    assert call_path.read_bytes() == before


def test_files_that_cannot_be_written_are_refused_in_a_line(call_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    assert refused("run", call_path, "--backend", "golden", "-o", folder) == f"cgdr: {folder}: Is a directory\n"


def test_calls_too_wide_for_the_device_show_the_ledger(tmp_path: Path) -> None:
    call = small_call()
    wide = {name: np.zeros((8, 1, 400), np.float16) for name in ("query", "key")}
    values = {**entries(call), **wide, "initial_state": np.zeros((3, 2, 32, 400), np.float16)}
    values = {name: x for name, x in values.items() if not name.startswith("expected_")}
    path = save_entries(tmp_path / "wide.safetensors", values)
    answer = Answer(("run", path))
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("cgdr: plan_chunk: `target`: no V tile fits the UB of 310p")
    assert "chunkKFp32" in answer.err
