"""The command line as a whole, `cgdr info`, `cgdr demo`, and real processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cgdr_numba
from cgdr_numba.cli import demo, report
from cgdr_numba.ops import BACKENDS, POOL_BACKENDS
from cgdr_numba.parity.operators import CHUNK_OPERATOR
from cgdr_numba.parity.runs import run_call
from cgdr_numba.sched.plan import REVISION
from cgdr_numba.sched.pool_plan import POOL_REVISION
from commands import ROOT, Answer, cgdr, misused, refused, run_process
from small_call import DATA, small_call


def test_version() -> None:
    assert cgdr("--version").out == f"cgdr {cgdr_numba.__version__}\n"


def test_help_names_every_command() -> None:
    text = cgdr("--help").out
    assert all(f"\n  {command} " in text for command in ("run", "plan", "demo", "info", "warmup"))
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["run", "plan", "demo", "info", "warmup"])
def test_every_command_has_help(command: str) -> None:
    assert f"Usage: cgdr {command}" in cgdr(command, "--help").out


def test_no_command_shows_the_help() -> None:
    assert "Commands:" in Answer(()).out + Answer(()).err


def test_unknown_commands_and_options_are_usage_errors() -> None:
    assert "No such command 'fly'" in misused("fly")
    assert "No such option: --fast" in misused("run", "call.npz", "--fast")
    assert "Missing argument 'CALL'" in misused("run")


def test_info_json_has_the_facts() -> None:
    facts = cgdr("info", "--json").json
    assert facts["cgdr_numba"] == cgdr_numba.__version__
    assert facts["numpy"] == np.__version__
    assert facts["backends"] == list(BACKENDS)
    assert facts["pool_backends"] == list(POOL_BACKENDS)
    assert (facts["revision"], facts["pool_revision"]) == (REVISION, POOL_REVISION)
    assert facts["targets"][0] == facts["targets"][0] | {"name": "310p", "cores": 8, "ub_bytes": 262144}
    assert facts["targets"][1]["name"] == "host"
    assert 1 <= facts["threads"] <= facts["most_threads"]
    assert 1 <= facts["usable_cores"] <= facts["affinity_cores"] <= facts["cores"]
    assert facts["quota_cores"] is None or facts["quota_cores"] > 0
    assert "served" not in facts
    assert all(facts[name] for name in ("python", "numba", "llvmlite", "scipy", "cpu", "threading_layer"))


def test_info_text_has_the_facts() -> None:
    facts, text = cgdr("info", "--json").json, cgdr("info").out
    names = (
        "cgdr_numba",
        "python",
        "numpy",
        "numba",
        "llvmlite",
        "scipy",
        "cpu",
        "cache_folder",
        "revision",
        "pool_revision",
    )
    assert all(str(facts[name]) in text for name in names)
    assert "262144 bytes" in text


@pytest.mark.slow
def test_info_try_shows_which_path_served() -> None:
    served = cgdr("info", "--try", "--json").json["served"]
    assert [served[name]["worker"] for name in ("prefill", "decode")] == ["chunks", "steps"]
    assert "backend fast, worker chunks, " in cgdr("info", "--try").out


def test_info_a_cache_that_is_off_is_said_to_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGDR_NUMBA_CACHE_DIR", "")
    assert cgdr("info", "--json").json["cache_folder"] is None
    assert "off (CGDR_NUMBA_CACHE_DIR is empty)" in cgdr("info").out


@pytest.mark.slow
def test_demo_every_backend_holds_its_bound() -> None:
    text = cgdr("demo").out
    assert "220 tokens in 2 sequence(s) (150, 70), Hk 1, Hv 2, Dk 128, Dv 128" in text
    assert "faithful: 310p: v_step 128" in text
    assert "\nfast: width " in text
    rows = [line.split() for line in text.splitlines()]
    heads = {(row[0], row[2]): [float(x) for x in row[3:]] for row in rows if len(row) == 9 and row[0].isdigit()}
    assert list(heads) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert all(max(errors[2:4]) <= 1e-6 and max(errors) <= 4e-4 for errors in heads.values())
    assert "3 tokens in 2 sequence(s) (1, 2), Hk 1, Hv 1, Dk 128, Dv 128, float16, pool of 4 slots float16" in text
    prefill = [[b, r] for b in BACKENDS for r in ("out", "final_state")]
    decode = [[b, r] for b in POOL_BACKENDS for r in ("out", "state")]
    assert [row[:2] for row in rows if row[-1:] == ["ok"]] == prefill + decode


def test_demo_errors_above_the_bound_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    call = small_call()
    call.expected["final_state"][2, 1] *= 1.001
    monkeypatch.setattr(demo, "sample_call", lambda: call)
    answer = Answer(("demo",))
    assert answer.code == 1
    assert answer.err.endswith("cgdr: an error is above its bound\n")
    verdicts = [line.split()[-1] for line in answer.out.splitlines() if line.endswith((" ok", " ABOVE"))]
    assert verdicts == ["ok", "ABOVE"] * 3 + ["ok"] * 2 * len(POOL_BACKENDS)


@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_a_run_that_compiles_is_announced(call_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    others = [name for name in BACKENDS if name != backend]
    run_call(small_call(), backend)
    assert cgdr("run", call_path, "--backend", backend, "--json").err == ""
    monkeypatch.setattr(report, "will_compile", lambda operator, name, _: (operator, name) == (CHUNK_OPERATOR, backend))
    answer = cgdr("run", call_path, "--backend", backend, "--json")
    assert answer.err.startswith(f"compiling the {backend} kernel: about 20 s the first time")
    assert answer.json["backend"] == backend
    for other in others:
        run_call(small_call(), other)
        assert cgdr("run", call_path, "--backend", other).err == ""
    assert cgdr("demo").err == answer.err


def test_process_version() -> None:
    done = run_process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cgdr {cgdr_numba.__version__}\n", "")


def test_process_errors_are_a_line_without_traceback() -> None:
    done = run_process("run", "nowhere.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cgdr: nowhere.safetensors: there is no such file\n"


def test_process_tables_are_plain_and_not_wrapped() -> None:
    done = run_process("run", DATA / "packed_one_head.safetensors", "--backend", "golden", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    head = next(line for line in done.stdout.splitlines() if "relative rms" in line)
    assert " ".join(head.split()) == "worst relative rms (sequence, head) max abs element got expected"
    assert any(line.split()[:3] == ["2", "1", "0"] for line in done.stdout.splitlines())


def test_process_plain_python_kernels_give_the_same_errors(call_path: Path) -> None:
    done = run_process("run", call_path, "--json", NUMBA_DISABLE_JIT="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["errors"] == cgdr("run", call_path, "--json").json["errors"]


def test_process_fast_as_plain_python_keeps_the_bound(call_path: Path) -> None:
    done = run_process("run", call_path, "--backend", "fast", "--json", NUMBA_DISABLE_JIT="1")
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    assert values["compile_seconds"] is None
    assert all(found["worst"] <= 4e-4 for found in values["errors"].values())


def test_process_a_reader_that_leaves_is_no_error() -> None:
    lengths = ",".join(["64"] * 3000)
    command = f"{sys.executable} -m cgdr_numba.cli plan --lengths {lengths} --nk 1 --nv 1 --dk 8 --dv 8 --json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 10"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ('{"operator', "")


def test_warmup_compiles_what_is_asked_for() -> None:
    text = cgdr("warmup").out
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("fast")] == [
        ["fast", "prefill"],
        ["fast", "decode"],
        ["fast", "gates"],
        ["fast", "pool"],
        ["fast", "raw"],
        ["fast", "parallel"],
    ]
    assert "faithful" not in text
    assert "kept" in text


def test_warmup_refuses_unknown_backends() -> None:
    assert "`--backend` must be fast, faithful or all, got 'golden'" in refused("warmup", "--backend", "golden")
