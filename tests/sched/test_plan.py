"""The plan: worked tiling values, the UB ledger, the greedy bins."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgdr_numba import ASCEND_310P, BudgetError, ContractError, DeviceSpec, Dims, host, plan_chunk
from cgdr_numba.core.dims import CHUNK, ceil_div, ceil_to
from cgdr_numba.sched.bins import fill_bins
from cgdr_numba.sched.items import EVERY_TILE
from cgdr_numba.sched.ledger import UbLedger

WORKED = [
    # ub, dk, dv, hv, v_step, tiles, block_dim, tmp, queue, split, q_cached, k_dma
    (262144, 32, 32, 2, 32, 1, 2, 66560, 4096, False, True, True),
    (262144, 64, 64, 8, 64, 1, 8, 99328, 8192, False, True, True),
    (262144, 63, 32, 2, 32, 1, 2, 82944, 4096, False, False, False),
    (262144, 127, 32, 2, 32, 1, 2, 116224, 8192, False, False, False),
    (262144, 128, 128, 8, 128, 1, 8, 214528, 32768, False, True, True),
    (262144, 128, 128, 32, 128, 1, 8, 214528, 32768, False, True, True),
    (262144, 128, 256, 1, 128, 2, 2, 214528, 32768, True, True, True),
    (262144, 128, 256, 8, 112, 3, 8, 214528, 28672, False, False, True),
    (262144, 192, 128, 8, 64, 2, 8, 215040, 24576, False, False, False),
    (262144, 256, 256, 4, 48, 6, 8, 223744, 24576, True, False, False),
    (262144, 256, 256, 8, 32, 8, 8, 215552, 16384, False, False, False),
    (262144, 320, 64, 8, 16, 4, 8, 228352, 10240, False, False, False),
    (196608, 128, 128, 16, 64, 2, 8, 165376, 16384, False, False, True),
    (196608, 128, 128, 4, 80, 2, 8, 165376, 20480, True, False, True),
    (196608, 128, 256, 1, 80, 4, 4, 165376, 20480, True, False, True),
    (196608, 256, 16, 8, 16, 1, 8, 174592, 8192, False, False, False),
]
FAILING = [(262144, 384, 64, 8), (196608, 256, 32, 8), (262144, 400, 16, 8), (262144, 368, 128, 8)]
FITTING_LIMITS = [(262144, 384, 16, 8), (262144, 352, 128, 8), (196608, 272, 16, 8)]


def plan_of(ub_bytes: int, dk: int, dv: int, hv: int, lengths: tuple[int, ...] = (64,), cores: int = 8):
    device = replace(ASCEND_310P, ub_bytes=ub_bytes, cores=cores)
    return plan_chunk(Dims(sum(lengths), len(lengths), 1, hv, dk, dv), lengths, target=device)


@pytest.mark.parametrize("row", WORKED, ids=lambda row: "-".join(map(str, row[:4])))
def test_worked_tiling_values(row) -> None:
    values = plan_of(*row[:4]).as_dict()
    names = ("v_step", "n_v_tiles", "block_dim", "tmp_bytes", "out_queue_bytes", "split", "q_cached", "k_dma")
    assert {name: values[name] for name in names} == dict(zip(names, row[4:], strict=True))


@pytest.mark.parametrize("row", FAILING)
def test_no_tile_fits(row) -> None:
    with pytest.raises(BudgetError, match=r"no V tile fits the UB of 310p: even 16 columns of Dk = \d+ need \d+ bytes"):
        plan_of(*row)


@pytest.mark.parametrize("row", FITTING_LIMITS)
def test_largest_key_widths_that_fit(row) -> None:
    assert plan_of(*row).tiling.v_step >= 16
    with pytest.raises(BudgetError):
        plan_of(row[0], row[1] + 16, *row[2:])


@pytest.mark.parametrize(
    ("dk", "v_step", "q_rows", "k_rows"),
    [
        (128, 112, 56, 64),
        (128, 64, 32, 64),
        (128, 80, 40, 64),
        (192, 64, 21, 42),
        (256, 48, 12, 24),
        (256, 32, 8, 16),
        (320, 16, 3, 6),
        (63, 32, 0, 0),
    ],
)
def test_rows_up_to_which_chunks_take_the_fast_loads(dk: int, v_step: int, q_rows: int, k_rows: int) -> None:
    dims = Dims(64, 1, 1, 8, dk, 256)
    paths = plan_chunk(dims, [64], v_step=v_step, target=replace(ASCEND_310P, ub_bytes=10**7)).paths
    assert (paths.q_cache_rows, paths.k_dma_rows) == (q_rows, k_rows)


def test_extension_dtypes_read_element_by_element() -> None:
    plan = plan_chunk(Dims(64, 1, 1, 8, 128, 128), [64], dtype="float32")
    assert tuple(plan.paths) == (0, 0, 0, 0)
    assert plan.extension
    assert "extension" in plan.explain()
    assert plan.tiling == plan_chunk(Dims(64, 1, 1, 8, 128, 128), [64]).tiling


def test_slices_of_the_commentary() -> None:
    """The example sums of the kernel's commentary: 128/128 with tiles of 16 columns."""
    dims = Dims(64, 1, 1, 8, 128, 128)
    assert UbLedger.for_chunk(dims, 16, True, 262144).tmp_bytes == 108032
    assert UbLedger.for_chunk(dims, 16, False, 262144).tmp_bytes == 108032 + 8192
    assert UbLedger.for_chunk(dims, 128, False, 262144).tmp_bytes == 230912
    names = [piece.name for piece in UbLedger.for_chunk(dims, 16, True, 262144).slices]
    assert names[0] == "out_queue"
    assert names[1:] == ["k", "k_beta", "decay", "v", "scores", "state", "attn_out", "g_cum", "delta", "dot", "exp_g"]


sizes = st.tuples(st.integers(1, 400), st.integers(1, 600), st.integers(1, 40), st.integers(1, 9))


@given(sizes, st.sampled_from([131072, 196608, 262144, 400000]))
def test_ledger_fills_the_buffer_without_gap_and_one_step_more_does_not_fit(size, ub_bytes: int) -> None:
    dk, dv, hv, cores = size
    try:
        plan = plan_of(ub_bytes, dk, dv, hv, cores=cores)
    except BudgetError:
        few = hv < cores
        smallest = UbLedger.for_chunk(Dims(64, 1, 1, hv, dk, dv), 16, dv <= 16 or few, ub_bytes)
        assert smallest.total_bytes > ub_bytes
        return
    tiling, ledger = plan.tiling, plan.tiling.ledger
    assert 0 <= ledger.free_bytes == ub_bytes - ledger.total_bytes
    cursor = 0
    for piece in ledger.slices:
        if piece.over is None:
            assert piece.offset == cursor
            cursor = piece.end
        else:
            under = ledger[piece.over]
            assert (piece.offset, piece.end <= under.end) == (under.offset, True)
        assert piece.offset % 32 == 0
        assert int(np.prod(piece.shape)) * 4 <= piece.n_bytes * (2 if piece.name == "out_queue" else 1)
    assert cursor == ledger.total_bytes
    if tiling.v_step < ceil_to(dv, 16):
        wider = tiling.v_step + 16
        assert UbLedger.for_chunk(plan.key.dims, wider, wider >= dv or hv < cores, ub_bytes).free_bytes < 0


def claim_as_every_core_does(loads: list[int], n_cores: int) -> list[list[int]]:
    """The kernel's walk: every core goes through all items and keeps those of its own number."""
    average = ceil_div(sum(loads), n_cores)
    kept: list[list[int]] = []
    for core in range(n_cores):
        load, used, mine = 0, 0, []
        for item, length in enumerate(loads):
            load += length
            if core == used:
                mine.append(item)
            if load >= average:
                load, used = 0, used + 1
        kept.append(mine)
    return kept


@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 12))
def test_bins_are_what_every_core_claims_by_itself(loads: list[int], n_cores: int) -> None:
    ptr = fill_bins(loads, n_cores)
    bins = [list(range(a, b)) for a, b in pairwise(ptr)]
    assert len(bins) <= n_cores
    assert bins == [mine for mine in claim_as_every_core_does(loads, n_cores) if mine]


lengths_lists = st.lists(st.integers(0, 300), max_size=7).map(tuple)


@given(lengths_lists, st.integers(1, 20), st.integers(1, 300), st.integers(1, 300), st.integers(1, 9))
def test_every_item_lies_in_exactly_one_bin_in_order(lengths, hv: int, dk: int, dv: int, cores: int) -> None:
    try:
        plan = plan_of(262144, dk, dv, hv, lengths, cores)
    except BudgetError:
        return
    tiling, values = plan.tiling, plan.as_dict()
    listed = [tuple(item) for one in values["bins"] for item in one["items"]]
    assert listed == sorted(set(listed))
    tiles = range(tiling.n_v_tiles) if tiling.split else [0 if tiling.n_v_tiles == 1 else EVERY_TILE]
    assert set(listed) == {(n, h, t) for n, size in enumerate(lengths) if size for h in range(hv) for t in tiles}
    assert len(values["bins"]) <= tiling.block_dim <= cores
    average = ceil_div(sum(lengths) * hv * len(tiles), tiling.block_dim)
    for one in values["bins"]:
        assert one["tokens"] == sum(lengths[n] for n, _, _ in one["items"])
    for one in values["bins"][:-1]:
        assert one["tokens"] >= average > one["tokens"] - lengths[one["items"][-1][0]]


@given(lengths_lists, st.integers(1, 20), st.integers(1, 300), st.integers(1, 9))
def test_host_and_device_agree_on_the_overlap(lengths, hv: int, dv: int, cores: int) -> None:
    """The device derives it from split, the host from the head count; a difference would overrun the buffer."""
    tiling = plan_of(262144, 64, dv, hv, lengths, cores).tiling
    assert tiling.overlap == (tiling.v_step >= dv or tiling.split)
    assert tiling.split == (dv > tiling.v_step and tiling.block_dim > hv)


def test_packed_example_bins() -> None:
    plan = plan_chunk(Dims(520, 2, 16, 32, 128, 128), [512, 8])
    assert plan.bin_tokens() == [2560] * 6 + [1280]
    assert plan.as_dict()["bins"][6]["items"] == [[0, 30, 0], [0, 31, 0], *[[1, h, 0] for h in range(32)]]
    assert plan.balance() == pytest.approx(16640 / (2560 * 8))


def test_empty_problem_has_no_bins() -> None:
    plan = plan_chunk(Dims(0, 2, 1, 2, 16, 16), [0, 0])
    assert (plan.n_bins, plan.n_rows, plan.balance()) == (0, 0, 1.0)
    assert plan.as_dict()["q_cached"] is False
    assert "no bins" in plan.explain()


def test_workspace_is_the_real_need_and_the_npu_minimum_is_only_reported() -> None:
    values = plan_chunk(Dims(130, 1, 1, 2, 16, 20), [130]).as_dict()
    assert values["workspace_bytes"] == 2 * 16 * 24 * 4
    assert values["npu_workspace_bytes"] == 32 * 1024 * 1024
    assert plan_chunk(Dims(CHUNK, 1, 1, 2, 16, 20), [CHUNK]).workspace_shape() == (1, 1, 1, 1)
    assert plan_chunk(Dims(130, 1, 1, 2, 16, 20), [130]).workspace_shape() == (1, 2, 16, 24)


def test_explain_names_what_matters() -> None:
    text = plan_chunk(Dims(130, 1, 1, 2, 128, 256), [130]).explain()
    for part in (
        "00e39ab5",
        "v_step 128",
        "over scores",
        "(0, 0, 0) .. (0, 0, 0)",
        "balance",
        "each an item of its own",
    ):
        assert part in text
    assert "(0, 0, *)" in plan_chunk(Dims(130, 1, 1, 8, 128, 256), [130]).explain()


@pytest.mark.parametrize("v_step", [0, 8, -16, 24, 144])
def test_asked_width_must_be_a_tile(v_step: int) -> None:
    with pytest.raises(ContractError, match=rf"`v_step` must be a multiple of 16 from 16 to 128, got {v_step}"):
        plan_chunk(Dims(64, 1, 1, 1, 128, 128), [64], v_step=v_step)


def test_asked_width_must_fit() -> None:
    with pytest.raises(BudgetError, match="even 512 columns"):
        plan_chunk(Dims(64, 1, 1, 1, 128, 512), [64], v_step=512)


@pytest.mark.parametrize(
    ("dims", "lengths", "message"),
    [
        (Dims(5, 1, 1, 1, 8, 8), [4], r"sum T = 5, got \[4\] with the sum 4"),
        (Dims(5, 2, 1, 1, 8, 8), [5], r"\[N\] = \[2\] lengths"),
        (Dims(5, 2, 1, 1, 8, 8), [6, -1], "at least 0"),
        (Dims(5, 1, 2, 3, 8, 8), [5], "Hk = 2, Hv = 3"),
        (Dims(5, 1, 1, 1, 0, 8), [5], "Dk = 0"),
    ],
)
def test_sizes_that_do_not_fit_together(dims: Dims, lengths: list[int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        plan_chunk(dims, lengths)


@pytest.mark.parametrize(("name", "value"), [("cores", 0), ("ub_bytes", -1), ("cores", True), ("ub_bytes", 1.5)])
def test_device_sizes_are_checked(name: str, value) -> None:
    with pytest.raises(ContractError, match=f"`{name}` must be an integer of at least 1, got {value}"):
        DeviceSpec(**{"name": "mine", "cores": 8, "ub_bytes": 262144, name: value})


@pytest.mark.parametrize("target", ["910b", "910B3", "gpu", 8])
def test_unknown_targets_are_refused(target) -> None:
    with pytest.raises(ContractError, match=r'`target` must be "310p", "host" or a DeviceSpec, got'):
        plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5], target=target)


def test_host_is_this_machine() -> None:
    device = host()
    assert device.cores >= 1
    assert device.ub_bytes >= 32768
    assert plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5], target="host").device == device


@pytest.mark.parametrize("dtype", ["float64", "half", ""])
def test_dtypes_are_those_that_backends_take(dtype: str) -> None:
    with pytest.raises(ContractError, match=rf"`dtype` must be one of float16, bfloat16, float32, got '{dtype}'"):
        plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5], dtype=dtype)


def test_loads_must_count_in_64_bits() -> None:
    with pytest.raises(ContractError, match="`lengths` must sum to at most"):
        plan_chunk(Dims(2**61, 1, 1, 4, 8, 8), [2**61])
