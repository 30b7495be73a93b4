"""The order in which a head's pieces run: states one V tile ahead, outputs behind by the depth of their queue."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.faithful import pool_worker
from cgdr_numba.core.faithful.pool_ub import PoolKinds
from cgdr_numba.core.phases import STEP_PHASES
from cgdr_numba.core.schedule import PoolLayout, PoolSchedule
from cgdr_numba.sched.pool_machine import machine_steps

DIMS = Dims(3, 1, 1, 1, 16, 40)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The pieces that run from now on, and their arguments; nothing is computed."""
    found: list[tuple[Any, ...]] = []

    def recorder(name: str) -> Any:
        return lambda *arguments: found.append((name, *arguments))

    pieces = {phase.name: recorder(phase.name) for phase in STEP_PHASES}
    monkeypatch.setattr(pool_worker, "phases", SimpleNamespace(**pieces))
    for name in ("load_head", "compute_token", "run_tokens", "tile_rows", "run_head"):
        kernel = getattr(pool_worker, name)
        monkeypatch.setattr(pool_worker, name, getattr(kernel, "py_func", kernel))
    return found


def run_head(attn_depth: int, state_depth: int) -> None:
    """Three tokens of one head over V tiles of 16, 16 and 8 rows."""
    plan = PoolSchedule(16, 3, state_depth, attn_depth, True, False, False)
    call = pool_worker.PoolCall(plan, PoolLayout(*[16] * 14), DIMS, PoolKinds(*[0] * 5), np.float32(1), None)
    words = [np.zeros(shape, np.uint16) for shape in ((3, 1, 16, 1), (3, 1, 40, 1), (3, 1, 1))]
    pool = np.arange(4, dtype=np.uint16)[:, None, None, None, None] + np.zeros((1, 1, 40, 16, 1), np.uint16)
    out = np.arange(3, dtype=np.uint16)[:, None, None, None] + np.zeros((1, 1, 40, 1), np.uint16)
    x: Any = SimpleNamespace(
        **dict.fromkeys(("q", "k"), words[0]),
        **dict.fromkeys(("v", "gk"), words[1]),
        **dict.fromkeys(("g", "beta"), words[2]),
        write_slot=np.array([1, 0, 2]),
        out=out,
        pool=pool,
    )
    ub: Any = SimpleNamespace(
        **dict.fromkeys(("state_queue", "attn", "state", "product"), np.zeros(512)),
        **dict.fromkeys(("v", "q", "k", "beta", "g", "gk"), np.zeros((8, 64))),
        attn_out=np.arange(attn_depth)[:, None],
        state_out=np.arange(state_depth)[:, None],
    )
    place = pool_worker.HeadPlace(0, 3, 0, 3)
    pool_worker.run_head(x, place, call, ub)


def test_states_come_in_as_the_machine_says(trace: list[tuple[Any, ...]]) -> None:
    run_head(1, 1)
    steps = [name for name, *_ in trace if name in ("prefetch_state", "take_state", "learn_rows", "load_rows")]
    assert steps[:3] == ["load_rows"] * 3, "q, k and v before the first state"
    expected = []
    for step in machine_steps(3):
        if step.action.startswith("prefetch"):
            expected.append("prefetch_state")
        elif step.action.startswith("take"):
            expected.append("take_state")
        elif step.action.startswith("all tokens"):
            expected += ["learn_rows"] * 3
    assert steps[3:] == expected
    rows = [arguments[0] for name, *arguments in trace if name == "prefetch_state"]
    assert [len(x) for x in rows] == [16, 16, 8]
    assert all((x == 3).all() for x in rows), "from the slot that is read"


def test_a_token_decays_learns_reads_and_is_queued(trace: list[tuple[Any, ...]]) -> None:
    run_head(1, 1)
    names = [name for name, *_ in trace]
    first = names.index("take_state") + 2
    token = ["decay_state", "learn_rows", "read_rows_out", "queue_attn", "queue_state", "copy_attn", "copy_state"]
    assert names[first : first + 14] == token * 2


@pytest.mark.parametrize(("attn_depth", "state_depth"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_results_leave_behind_the_next_token_where_there_are_two_buffers(
    trace: list[tuple[Any, ...]], attn_depth: int, state_depth: int
) -> None:
    run_head(attn_depth, state_depth)
    for what, depth in (("attn", attn_depth), ("state", state_depth)):
        events = [(name, arguments) for name, *arguments in trace if name in (f"queue_{what}", f"copy_{what}")]
        order = ["queue", "copy"] * 3 if depth == 1 else ["queue", "queue", "copy", "queue", "copy", "copy"]
        assert [name.split("_")[0] for name, _ in events] == order * 3, "nothing is pending between tiles"
        # Buffers take turns, and a copy goes where its token's results belong.
        copies = [arguments for name, arguments in events if name.startswith("copy")]
        assert [int(arguments[0][0]) for arguments in copies] == [i % depth for i in range(3)] * 3
        targets = [int(arguments[-1].flat[0]) for arguments in copies]
        assert targets == ([0, 1, 2] if what == "attn" else [1, 0, 2]) * 3
