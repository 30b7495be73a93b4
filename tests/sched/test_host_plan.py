"""Plans of fast: every item once, every column once, scratch within the cache, even bins."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgdr_numba import ContractError, DeviceSpec, Dims, DtypeError, HostPlan, Plan, chunk_gated_delta_rule, plan_chunk
from cgdr_numba.core.dims import FAST_CHUNK, ceil_to
from cgdr_numba.core.fast.chunk_arena import chunk_bytes
from cgdr_numba.core.fast.chunk_worker import FEW
from cgdr_numba.core.threads import current_threads
from cgdr_numba.sched.device import host_cache_bytes
from cgdr_numba.sched.host_plan import HEAD_COLUMNS, LANES, SHARED_COLUMNS
from judge import assert_same_bits, run_fla
from reference import make_case


def plan_of(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    dims: tuple[int, int] = (128, 128),
    threads: int = 2,
    cache: int = 2**20,
) -> HostPlan:
    """The plan for sequences of some lengths, (Hk, Hv), (Dk, Dv)."""
    device = DeviceSpec("mine", threads, cache)
    return plan_chunk(Dims(sum(lengths), len(lengths), *heads, *dims), lengths, backend="fast", target=device)


def places_of(plan: HostPlan, part: int) -> list[tuple[int, int]]:
    """The (value head of the key head, column) that a part covers."""
    dims = plan.key.dims
    group, tile = divmod(part, plan.n_v_tiles)
    n_shared = dims.hv // dims.hk
    heads = range(group * plan.n_together, min((group + 1) * plan.n_together, n_shared))
    return [(h, c) for h in heads for c in range(tile * plan.width, min((tile + 1) * plan.width, dims.dv))]


lengths_lists = st.lists(st.integers(0, 300), max_size=7).map(tuple)
heads_pairs = st.tuples(st.integers(1, 6), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] * pair[1]))
dims_pairs = st.tuples(st.integers(1, 300), st.integers(1, 300))
caches = st.sampled_from([2**15, 2**17, 2**18, 2**20])


@given(lengths_lists, heads_pairs, dims_pairs, st.integers(1, 9), caches)
def test_every_item_lies_in_exactly_one_bin_and_every_column_in_one_tile(lengths, heads, dims, threads, cache) -> None:
    plan = plan_of(lengths, heads, dims, threads, cache)
    listed = [tuple(item) for one in plan.as_dict()["bins"] for item in one["items"]]
    assert len(listed) == len(set(listed))
    present = [n for n, length in enumerate(lengths) if length]
    assert {item[:2] for item in listed} == {(n, head) for n in present for head in range(heads[0])}
    for n, head in {item[:2] for item in listed}:
        parts = sorted(part for m, h, part in listed if (m, h) == (n, head))
        covered = [place for part in parts for place in places_of(plan, part)]
        assert sorted(covered) == [(h, c) for h in range(heads[1] // heads[0]) for c in range(dims[1])]
    assert plan.n_bins <= threads
    assert all(begin < end for begin, end in pairwise(plan.bin_ptr))


@given(lengths_lists, heads_pairs, dims_pairs, st.integers(1, 9), caches)
def test_scratch_fits_the_cache_or_the_tile_is_the_narrowest(lengths, heads, dims, threads, cache) -> None:
    plan, n_shared = plan_of(lengths, heads, dims, threads, cache), heads[1] // heads[0]
    assert plan.width % LANES == 0
    assert plan.width <= ceil_to(dims[1], LANES)
    assert 1 <= plan.n_together <= n_shared
    assert plan.n_together == 1 or plan.width == ceil_to(dims[1], LANES), "heads are parted before their columns"
    assert plan.arena_bytes == chunk_bytes(*dims, plan.width, plan.n_together)
    assert plan.arena_bytes <= cache or (plan.n_together, plan.width) == (1, LANES)
    if threads == 1 and plan.width < ceil_to(dims[1], LANES):
        assert chunk_bytes(*dims, 2 * plan.width, 1) > cache, "one thread takes the widest tile that fits"


@given(lengths_lists, heads_pairs, dims_pairs, st.integers(1, 9))
def test_loads_are_tokens_times_columns_and_bins_close_at_the_average(lengths, heads, dims, threads) -> None:
    plan = plan_of(lengths, heads, dims, threads)
    of_items = [
        lengths[n] * (len(places) + HEAD_COLUMNS * len({h for h, _ in places}) + SHARED_COLUMNS)
        for n, _, part in plan.items.tolist()
        for places in [places_of(plan, part)]
    ]
    bins = [of_items[begin:end] for begin, end in pairwise(plan.bin_ptr)]
    assert plan.bin_loads() == [sum(loads) for loads in bins]
    assert plan.bin_tokens() == [
        sum(lengths[n] for n, _, _ in plan.items[begin:end].tolist()) for begin, end in pairwise(plan.bin_ptr)
    ]
    average = -(-sum(of_items) // threads)
    assert all(sum(loads[:-1]) < average for loads in bins)
    assert all(sum(loads) >= average for loads in bins[:-1])


@pytest.mark.parametrize("hk", [1, 2, 4])
@pytest.mark.parametrize("n_shared", [1, 2, 4])
def test_short_sequences_beside_a_long_one_hardly_lengthen_the_fullest_bin(hk: int, n_shared: int) -> None:
    heads = (hk, hk * n_shared)
    alone = plan_of((4000,), heads)
    for lengths in ((4000, 10, 10, 10), (10, 10, 10, 4000), (10, 4000, 10, 10)):
        assert max(plan_of(lengths, heads).bin_loads()) <= 1.2 * max(alone.bin_loads())


def test_one_key_head_is_cut_into_equal_bins() -> None:
    plan = plan_of((4096,), (1, 2))
    first, second = plan.bin_loads()
    assert first == second
    assert (plan.n_together, plan.n_v_tiles, plan.balance()) == (1, 1, 1.0), "a value head each"
    assert plan_of((4096,), (1, 1)).n_v_tiles == 2


def test_a_single_thread_takes_all_in_the_callers_order() -> None:
    plan = plan_of((3, 200, 0, 7), (1, 2), threads=1)
    assert plan.items.tolist() == [[0, 0, 0], [1, 0, 0], [3, 0, 0]]
    assert plan.bin_ptr.tolist() == [0, 3]


def test_no_tokens_have_no_bins() -> None:
    plan = plan_of((0, 0), (1, 2))
    assert (plan.n_bins, plan.bin_loads(), plan.balance()) == (0, [], 1.0)
    assert "no bins: no tokens" in plan.explain()


def test_threads_are_numbas_the_targets_cores_or_as_asked() -> None:
    dims, lengths = Dims(100, 1, 4, 4, 64, 64), [100]
    assert plan_chunk(dims, lengths, backend="fast").n_threads == current_threads()
    assert plan_chunk(dims, lengths, backend="fast").cache_bytes == host_cache_bytes()
    device = DeviceSpec("mine", 3, 123456)
    asked = plan_chunk(dims, lengths, backend="fast", target=device)
    assert (asked.n_threads, asked.cache_bytes, asked.n_bins) == (3, 123456, 3)
    overridden = plan_chunk(dims, lengths, backend="fast", target=device, threads=4)
    assert (overridden.n_threads, overridden.cache_bytes, overridden.n_bins) == (4, 123456, 4)


def test_dtypes_share_a_plan() -> None:
    dims = Dims(100, 1, 4, 4, 64, 64)
    plans = [plan_chunk(dims, [100], backend="fast", dtype=dtype) for dtype in ("float16", "float32")]
    assert plans[0] is plans[1]


def test_backends_have_plans_of_their_own() -> None:
    dims = Dims(100, 1, 4, 4, 64, 64)
    assert isinstance(plan_chunk(dims, [100]), Plan)
    assert isinstance(plan_chunk(dims, [100], backend="faithful"), Plan)
    assert isinstance(plan_chunk(dims, [100], backend="fast"), HostPlan)


def test_explain_names_what_matters() -> None:
    text = plan_of((4000, 10, 10), (1, 2)).explain()
    for part in (
        "no bit of the results",
        "at most 2 thread(s), 1048576 bytes of cache",
        "T 4020 in 3 sequences, Hk 1, Hv 2, Dk 128, Dv 128",
        "width 128: 1 V tile(s) a head",
        "(sequence, key head, part); a part is a V tile of 1 of the key head's 2 value head(s)",
        f"chunks of {FAST_CHUNK} tokens",
        f"scratch of {chunk_bytes(128, 128, 128, 1)} bytes a bin\n",
        f"takes the token loop where it has up to {FEW}\n",
        "bin 0: load 578880, 4020 tokens, items (2, 0, 0) .. (0, 0, 0) (3)",
        "bin 1: load 578880, 4020 tokens, items (2, 0, 1) .. (0, 0, 1) (3)",
        "balance: mean load / largest load over 2 thread(s) = 1.000",
    ):
        assert part in text
    assert "more than the cache" in plan_of((100,), (1, 1), (1280, 32), cache=2**15).explain()


def test_as_dict_has_the_plan() -> None:
    values = plan_of((100, 0, 4), (2, 4), (64, 32), threads=1).as_dict()
    assert values == {
        "operator": "chunk_gated_delta_rule",
        "backend": "fast",
        "threads": 1,
        "cache_bytes": 2**20,
        "dims": {"n_tokens": 104, "n_sequences": 3, "hk": 2, "hv": 4, "dk": 64, "dv": 32},
        "lengths": [100, 0, 4],
        "chunk": FAST_CHUNK,
        "n_together": 2,
        "width": 32,
        "n_v_tiles": 1,
        "arena_bytes": chunk_bytes(64, 32, 32, 2),
        "bins": [
            {
                "bin": 0,
                "tokens": 208,
                "load": 208 * (2 * (32 + HEAD_COLUMNS) + SHARED_COLUMNS),
                "items": [[0, 0, 0], [0, 1, 0], [2, 0, 0], [2, 1, 0]],
            }
        ],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v_step": 32}, r'`v_step` must be left out with backend="fast", got 32'),
        ({"threads": 0}, "`threads` must be at least 1, got 0"),
        ({"target": "910b"}, "`target` must be"),
        ({"dtype": "float64"}, "`dtype` must be .*, got 'float64'"),
        ({"backend": "golden"}, '`backend` must be "faithful" or "fast", got \'golden\''),
        ({"backend": "faithful", "threads": 2}, r'`threads` must be left out with backend="faithful", got 2'),
    ],
)
def test_wrong_options_are_refused(options, message: str) -> None:
    with pytest.raises(ContractError, match=f"^plan_chunk: {message}"):
        plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5], **{"backend": "fast", **options})


@pytest.mark.parametrize("threads", [1.0, True, "2"])
def test_threads_are_integers(threads) -> None:
    with pytest.raises(DtypeError, match="`threads` must be an integer or None, got"):
        plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5], backend="fast", threads=threads)


@pytest.mark.parametrize(
    ("dims", "lengths", "message"),
    [
        (Dims(5, 1, 1, 1, 8, 8), [4], r"sum T = 5, got \[4\] with the sum 4"),
        (Dims(5, 1, 2, 3, 8, 8), [5], "Hk = 2, Hv = 3"),
        (Dims(2**57, 1, 1, 4, 8, 8), [2**57], "`lengths` must sum to at most"),
    ],
)
def test_sizes_that_do_not_fit_together(dims: Dims, lengths: list[int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        plan_chunk(dims, lengths, backend="fast")


def test_a_plan_is_taken_for_its_sizes_and_changes_no_bit() -> None:
    case = make_case(7, t=21, heads=(1, 2), dims=(16, 40), cu=np.array([0, 17, 21]), dtype=np.float32)
    dims, lengths = Dims(21, 2, 1, 2, 16, 40), [17, 4]
    expected = run_fla(case, "fast", threads=1)
    plans = [plan_chunk(dims, lengths, backend="fast", threads=threads) for threads in (1, 2, 8)]
    assert len({plan.width for plan in plans}) > 1
    for plan in plans:
        assert_same_bits(run_fla(case, "fast", plan=plan), expected)
    for other in (plan_chunk(dims, [4, 17], backend="fast"), replace(plans[0], key=None)):
        with pytest.raises(ContractError, match="`plan` must be made for HostKey"):
            run_fla(case, "fast", plan=other)
    with pytest.raises(DtypeError, match="`plan` must be a HostPlan or None, got Plan"):
        run_fla(case, "fast", plan=plan_chunk(dims, lengths, dtype="float32"))
    with pytest.raises(DtypeError, match="`plan` must be a Plan or None, got HostPlan"):
        chunk_gated_delta_rule(case.q, case.k, case.v, backend="faithful", cu_seqlens=case.cu, plan=plans[0])
