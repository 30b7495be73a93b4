"""`cgdr run` and `cgdr plan` with calls over a pool."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cgdr_numba.ops import POOL_BACKENDS
from cgdr_numba.parity.calls import save_call
from cgdr_numba.parity.replays import replay
from cgdr_numba.sched.pool_plan import POOL_REVISION
from commands import Answer, cgdr, misused, refused
from small_call import POOL_LENGTHS, small_pool_call

SIZES = ("--lengths", "1,1", "--nk", 16, "--nv", 32, "--dk", 128, "--dv", 128)


@pytest.fixture
def pool_path(tmp_path: Path) -> Path:
    """A small recorded call over a pool."""
    path = tmp_path / "pool.safetensors"
    save_call(path, small_pool_call())
    return path


@pytest.mark.parametrize("backend", POOL_BACKENDS)
def test_run_prints_errors_by_sequence_and_by_slot(pool_path: Path, backend: str) -> None:
    text = cgdr("run", pool_path, "--backend", backend).out
    assert f"{pool_path}: npu_recurrent_gated_delta_rule\n" in text
    assert "5 tokens in 3 sequence(s) (3, 0, 2), Hk 1, Hv 2, Dk 16, Dv 32, float16, pool of 8 slots float16" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["sequence", "tokens", "head", "out"] in rows
    slots = rows[rows.index(["slot", "written", "head", "state"]) + 1 :]
    assert [row[:3] for row in slots if row] == [
        [str(slot), "yes" if slot in small_pool_call().arrays["ssm_state_indices"] else "no", str(h)]
        for slot in range(8)
        for h in (0, 1)
    ]
    assert (POOL_REVISION in text) == (backend == "faithful")


@pytest.mark.parametrize("backend", POOL_BACKENDS)
def test_run_as_json_and_to_a_file(pool_path: Path, tmp_path: Path, backend: str) -> None:
    target = tmp_path / "out.safetensors"
    values = cgdr("run", pool_path, "--backend", backend, "-o", target, "--json").json
    assert (values["operator"], values["lengths"]) == ("npu_recurrent_gated_delta_rule", list(POOL_LENGTHS))
    assert sorted(values["errors"]) == ["out", "state"]
    assert all(found["worst"] <= 4e-4 for found in values["errors"].values())
    assert values["revision"] == (POOL_REVISION if backend == "faithful" else None)
    out, pool = replay(small_pool_call(), backend)
    with safe_open(target, "numpy") as file:
        assert np.array_equal(file.get_tensor("out"), out)
        assert np.array_equal(file.get_tensor("state"), pool)
        assert file.metadata()["backend"] == backend
    wrote = cgdr("run", pool_path, "--backend", backend, "-o", target).out
    assert f"wrote {target}: out [5, 2, 32], state [8, 2, 32, 16]" in wrote


def test_plan_of_a_recorded_call(pool_path: Path) -> None:
    made = cgdr("plan", pool_path, "--json").json
    assert (made["operator"], made["lengths"]) == ("npu_recurrent_gated_delta_rule", list(POOL_LENGTHS))
    assert [item for core in made["bins"] for item in core["items"]] == [[0, 0], [0, 1], [2, 0], [2, 1]]
    assert "--operator, --gk" in misused("plan", pool_path, "--operator", "recurrent", "--gk", "none")
    assert "a call over a pool has a plan on faithful only" in refused("plan", pool_path, "--backend", "fast")


def test_plan_of_sizes() -> None:
    made = cgdr("plan", "--operator", "recurrent", *SIZES, "--json").json
    figures = ("v_step", "n_v_tiles", "block_dim", "fixed_bytes", "working_bytes", "rest_bytes", "scratch_bytes")
    assert [made[name] for name in figures] == [128, 1, 8, 6784, 21120, 189312, 145920]
    assert (made["profile"], made["overflow_bytes"]) == ({"state_out": 1, "attn_out": 2}, 0)
    vector = cgdr("plan", "--operator", "recurrent", *SIZES, "--gk", "vector", "--json").json
    assert (vector["profile"], vector["rest_bytes"]) == ({"state_out": 1, "attn_out": 1}, 185472)
    scalar = cgdr("plan", "--operator", "recurrent", *SIZES, "--gk", "scalar", "--no-g", "--json").json
    assert (scalar["gates"], scalar["rest_bytes"]) == ({"has_g": False, "gk": "scalar"}, 188288)


def test_plan_shows_what_the_npu_would_overflow() -> None:
    text = cgdr("plan", "--operator", "recurrent", *SIZES, "--ub", 196608).out
    assert "OVERFLOW: the scratch runs 22144 bytes past its part of the UB, unseen by the NPU" in text
    assert "profile {2,2}: 9 queue buffers: unreachable, there are 8" in text
    assert "   0  prefetch tile 0" in text


def test_faithful_runs_no_call_that_would_overflow(tmp_path: Path) -> None:
    call = small_pool_call()
    arrays = {**call.arrays, "state": np.zeros((8, 2, 320, 64), np.float16)}
    arrays |= {"query": np.zeros((5, 1, 64), np.float16), "key": np.zeros((5, 1, 64), np.float16)}
    arrays["value"] = np.zeros((5, 2, 320), np.float16)
    path = tmp_path / "wide.safetensors"
    save_call(path, type(call)("wide", call.operator, arrays, {}, None, {}))
    assert "OVERFLOW" in cgdr("plan", path).out
    answer = Answer(("run", path))
    assert (answer.code, answer.out) == (1, "")
    assert "the NPU would overflow its UB by" in answer.err
    assert "stateInQueue_" in answer.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--operator", "decode", *SIZES), '`--operator` must be "chunk" or "recurrent", got \'decode\''),
        ((*SIZES, "--gk", "vector"), "`--gk` and `--no-g` must be left out without `--operator recurrent`"),
        ((*SIZES, "--no-g"), "`--gk` and `--no-g` must be left out without `--operator recurrent`"),
        (("--operator", "recurrent", *SIZES, "--gk", "both"), '`--gk` must be "none" or "scalar" or "vector"'),
        (("--operator", "recurrent", *SIZES, "--backend", "fast"), "`--backend` must be \"faithful\", got 'fast'"),
        (("--operator", "recurrent", "--lengths", 9, *SIZES[2:]), "at most 8 tokens a sequence for the 310P's kernel"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(options: tuple[object, ...], message: str) -> None:
    assert message in refused("plan", *options)
