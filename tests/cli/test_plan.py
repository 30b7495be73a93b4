"""`cgdr plan`: the worked rows of the kernel's tiling, and what it says where nothing can be planned."""

from pathlib import Path

import pytest

from cgdr_numba.core.threads import current_threads
from cgdr_numba.sched.device import usable_cores
from cgdr_numba.sched.host_plan import HEAD_COLUMNS, SHARED_COLUMNS
from cgdr_numba.sched.plan import REVISION
from commands import Answer, cgdr, misused, refused
from small_call import LENGTHS

SIZES = ("--nk", 16, "--nv", 32, "--dk", 128, "--dv", 128)
WORKED = [
    # ub, (dk, dv, nv), (v_step, tiles, block_dim, tmp, out queue, split, q cached, k by DMA)
    (262144, (32, 32, 2), (32, 1, 2, 66560, 4096, False, True, True)),
    (262144, (64, 64, 8), (64, 1, 8, 99328, 8192, False, True, True)),
    (262144, (63, 32, 2), (32, 1, 2, 82944, 4096, False, False, False)),
    (262144, (127, 32, 2), (32, 1, 2, 116224, 8192, False, False, False)),
    (262144, (128, 128, 8), (128, 1, 8, 214528, 32768, False, True, True)),
    (262144, (128, 128, 64), (128, 1, 8, 214528, 32768, False, True, True)),
    (262144, (128, 256, 1), (128, 2, 2, 214528, 32768, True, True, True)),
    (262144, (128, 256, 8), (112, 3, 8, 214528, 28672, False, False, True)),
    (262144, (192, 128, 8), (64, 2, 8, 215040, 24576, False, False, False)),
    (262144, (256, 256, 4), (48, 6, 8, 223744, 24576, True, False, False)),
    (262144, (256, 256, 8), (32, 8, 8, 215552, 16384, False, False, False)),
    (262144, (320, 64, 8), (16, 4, 8, 228352, 10240, False, False, False)),
    (262144, (384, 64, 8), None),
    (196608, (128, 128, 16), (64, 2, 8, 165376, 16384, False, False, True)),
    (196608, (128, 128, 4), (80, 2, 8, 165376, 20480, True, False, True)),
    (196608, (128, 256, 1), (80, 4, 4, 165376, 20480, True, False, True)),
    (196608, (256, 16, 8), (16, 1, 8, 174592, 8192, False, False, False)),
    (196608, (256, 32, 8), None),
]
"""Worked rows of the kernel's host tiling on 8 cores; None where nothing fits."""
COLUMNS = ("v_step", "n_v_tiles", "block_dim", "tmp_bytes", "out_queue_bytes", "split", "q_cached", "k_dma")


def sizes_of(dims: tuple[int, int, int], ub: int) -> tuple[object, ...]:
    """The options of a row of the worked table; full chunks."""
    dk, dv, nv = dims
    return ("--lengths", 128, "--nk", nv, "--nv", nv, "--dk", dk, "--dv", dv, "--ub", ub)


@pytest.mark.parametrize(("ub", "dims", "row"), [row for row in WORKED if row[2] is not None])
def test_worked_rows(ub: int, dims: tuple[int, int, int], row: tuple[object, ...]) -> None:
    made = cgdr("plan", *sizes_of(dims, ub), "--json").json
    assert tuple(made[name] for name in COLUMNS) == row
    assert made["device"] == {"name": "310p", "cores": 8, "ub_bytes": ub}
    assert sum(len(one["items"]) for one in made["bins"]) == dims[2] * (made["n_v_tiles"] if made["split"] else 1)


@pytest.mark.parametrize(("ub", "dims"), [row[:2] for row in WORKED if row[2] is None])
def test_worked_rows_that_do_not_fit(ub: int, dims: tuple[int, int, int]) -> None:
    answer = Answer(("plan", *sizes_of(dims, ub)))
    assert (answer.code, answer.out) == (1, "")
    first, *ledger = answer.err.splitlines()
    assert first.startswith("cgdr: plan_chunk: `target`: no V tile fits the UB of 310p: even 16 columns")
    assert first.endswith(f"got {ub}")
    assert [line.split()[0] for line in ledger[:3]] == ["slice", "out_queue", "k"]
    assert f"UB {ub}; free -" in ledger[-1]
    in_json = Answer(("plan", *sizes_of(dims, ub), "--json"))
    assert (in_json.code, in_json.err) == (1, answer.err)
    assert in_json.json == {"error": first.removeprefix("cgdr: "), "ledger": ledger}


def test_text_shows_the_map_and_the_bins() -> None:
    text = cgdr("plan", "--lengths", "512,8", *SIZES).out
    assert REVISION in text
    assert "state      stateInFp32       128x128       147456    65536  over scores" in text
    assert "sum 247296 = queue 32768 + tmp 214528; UB 262144; free 14848" in text
    assert "bin 6: 1280 tokens, items (0, 30, 0) .. (1, 31, 0) (34)" in text
    assert "= 0.812" in text


def test_a_recorded_call_has_its_own_sizes(call_path: Path) -> None:
    made = cgdr("plan", call_path, "--json").json
    dims = {"n_tokens": 8, "n_sequences": 3, "hk": 1, "hv": 2, "dk": 16, "dv": 32}
    assert (made["dims"], made["lengths"], made["dtype"]) == (dims, list(LENGTHS), "float16")
    assert [item for one in made["bins"] for item in one["items"]] == [[n, h, 0] for n in (0, 2) for h in (0, 1)]
    assert "--nk, --dtype" in misused("plan", call_path, "--nk", 1, "--dtype", "float16")


def test_sizes_of_the_device_can_be_replaced() -> None:
    made = cgdr("plan", "--lengths", "64,64", *SIZES, "--cores", 3, "--ub", 200000, "--json").json
    assert made["device"] == {"name": "310p", "cores": 3, "ub_bytes": 200000}
    assert (made["block_dim"], len(made["bins"])) == (3, 3)
    assert cgdr("plan", "--lengths", 64, *SIZES, "--target", "host", "--json").json["device"]["name"] == "host"
    narrow = cgdr("plan", "--lengths", 64, *SIZES, "--v-step", 32, "--json").json
    assert (narrow["v_step"], narrow["n_v_tiles"]) == (32, 4)


def test_fast_on_the_host() -> None:
    text = cgdr("plan", "--backend", "fast", "--lengths", "512,8", *SIZES, "--cores", 2, "--ub", 2**20).out
    assert "host: at most 2 thread(s), 1048576 bytes of cache a core" in text
    assert "width 128: 1 V tile(s) a head" in text
    load = 4160 * (2 * (128 + HEAD_COLUMNS) + SHARED_COLUMNS)
    assert f"bin 1: load {load}, 4160 tokens, items (1, 15, 0) .. (0, 1, 0) (16)" in text
    assert "= 1.000" in text
    assert REVISION not in text


def test_fast_as_json(call_path: Path) -> None:
    made = cgdr("plan", call_path, "--backend", "fast", "--json").json
    assert (made["backend"], made["threads"], made["lengths"]) == ("fast", current_threads(), list(LENGTHS))
    assert {tuple(item[:2]) for one in made["bins"] for item in one["items"]} == {(0, 0), (2, 0)}
    sizes = ("--lengths", 4096, "--nk", 1, "--nv", 2, "--dk", 128, "--dv", 128)
    made = cgdr("plan", *sizes, "--backend", "fast", "--cores", 2, "--ub", 2**20, "--json").json
    assert (made["n_together"], made["width"], made["n_v_tiles"]) == (1, 128, 1)
    assert [one["load"] for one in made["bins"]] == [4096 * (128 + HEAD_COLUMNS + SHARED_COLUMNS)] * 2
    for target, threads in (("host", usable_cores()), ("310p", 8)):
        assert cgdr("plan", *sizes, "--backend", "fast", "--target", target, "--json").json["threads"] == threads


def test_faithful_says_what_it_is() -> None:
    assert cgdr("plan", "--lengths", 64, *SIZES, "--json").json["backend"] == "faithful"


def test_extensions_say_so() -> None:
    assert "extension" in cgdr("plan", "--lengths", 64, *SIZES, "--dtype", "float32").out
    assert "extension" not in cgdr("plan", "--lengths", 64, *SIZES).out


def test_empty_sequences_are_planned() -> None:
    made = cgdr("plan", "--lengths", "0,0", *SIZES, "--json").json
    assert (made["bins"], made["rows"]) == ([], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "64,-3", *SIZES), "`lengths` must be [N] = [2] lengths of at least 0"),
        (("--lengths", 64, *SIZES, "--nk", 5), "Hv % Hk == 0, got Hk = 5, Hv = 32"),
        (("--lengths", 64, *SIZES, "--dk", 0), "got Hk = 16, Hv = 32, Dk = 0"),
        (("--lengths", 64, *SIZES, "--dtype", "float64"), "`--dtype` must be"),
        (("--lengths", 64, *SIZES, "--target", "910b"), "got '910b' (the 910B's kernel is another one)"),
        (("--lengths", 64, *SIZES, "--ub", 0), "`ub_bytes` must be an integer of at least 1, got 0"),
        (("--lengths", 64, *SIZES, "--cores", -1), "`cores` must be an integer of at least 1, got -1"),
        (("--lengths", 64, *SIZES, "--v-step", 24), "`v_step` must be a multiple of 16"),
        (("--lengths", 10**20, *SIZES), "must fit in int64"),
        (("--lengths", 64, *SIZES, "--backend", "fast", "--v-step", 32), "`v_step` must be left out"),
        (("--lengths", 64, *SIZES, "--backend", "golden"), '`--backend` must be "faithful" or "fast", got \'golden\''),
        (("nowhere.safetensors",), "nowhere.safetensors: there is no such file"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(options: tuple[object, ...], message: str) -> None:
    assert message in refused("plan", *options)


def test_wrong_usage() -> None:
    assert "missing: --nk, --nv, --dk, --dv" in misused("plan", "--lengths", 64)
    for lengths in ("64,x", "64,,8", "", "1.5"):
        message = f"--lengths must be integers with commas between, got '{lengths}'"
        assert message in misused("plan", "--lengths", lengths, *SIZES)
