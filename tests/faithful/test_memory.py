"""A call allocates its results, the workspace and one arena a bin, each on a cache line, and nothing of size beside."""

import tracemalloc

import numpy as np
import pytest

from cgdr_numba import plan_chunk
from cgdr_numba.core import memory
from cgdr_numba.core.dims import Dims
from judge import run_cann
from reference import make_case


@pytest.mark.slow
def test_memory_beyond_results_is_workspace_and_arenas() -> None:
    case = make_case(0, t=1000, heads=(2, 4), dims=(64, 64), dtype=np.float16)
    case = case.but(g=case.g.astype(np.float32), q=case.q[:, ::-1], v=case.v[:, ::-1])
    plan = plan_chunk(Dims(1000, 1, 2, 4, 64, 64), [1000])
    run_cann(case, "faithful", plan=plan)
    arenas = plan.n_bins * plan.tiling.ledger.total_bytes
    workspace = int(np.prod(plan.workspace_shape())) * 4
    results = (case.v.size + case.state.size) * 2
    tracemalloc.start()
    try:
        result = run_cann(case, "faithful", plan=plan)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.out.dtype == np.float16
    assert peak <= arenas + workspace + results + 60_000


def test_arrays_begin_on_a_cache_line() -> None:
    for shape in ((3, 5), (0, 4), (1,), (7, 1, 3)):
        for dtype in (np.float16, np.float32, np.float64):
            array = memory.empty(shape, dtype)
            assert array.shape == shape
            assert array.flags.c_contiguous
            assert array.ctypes.data % memory.ALIGNMENT_BYTES == 0 or array.size == 0
    scratch = memory.allocate(3, 1000, (1, 2, 3, 8))
    assert scratch.arenas.shape == (3, 256)
    assert all(arena.ctypes.data % memory.ALIGNMENT_BYTES == 0 for arena in scratch.arenas)
    assert scratch.workspace.shape == (1, 2, 3, 8)
    assert np.isnan(scratch.arenas).all(), "tests see poisoned memory"
