"""The machine that brings states in ahead, and every figure of its document, with the true one beside it."""

from dataclasses import replace

import pytest

from cgdr_numba import ASCEND_310P
from cgdr_numba.core.dims import GateForm
from cgdr_numba.sched.pool_ledger import PoolLedger
from cgdr_numba.sched.pool_machine import (
    dots_a_tile_token,
    head_counts,
    heads_a_core,
    machine_steps,
    n_dot_groups,
    state_slot_bytes,
)
from cgdr_numba.sched.profile import Profile, at_width, fixed_bytes, queue_buffers
from pool_plans import UB_310P, G, plan_of, sizes

EXAMPLE = sizes(32, 128, 128, hk=8)
"""b = 1, Nv 32, Nk 8, Dk = Dv = 128, one token: the document takes v_step 16, and the host another one."""


def test_the_documents_example_illustrative_and_true_v_step() -> None:
    illustrative, true = plan_of(EXAMPLE, G, v_step=16).tiling, plan_of(EXAMPLE, G).tiling
    assert (illustrative.v_step, illustrative.n_v_tiles) == (16, 8)
    assert (true.v_step, true.n_v_tiles) == (128, 1)


def test_the_documents_example_cores() -> None:
    """32 units; the document looks at 32 cores and at fewer, and the host never starts more than 8."""
    assert heads_a_core(EXAMPLE, 32) == 1
    many = replace(ASCEND_310P, cores=32)
    assert plan_of(EXAMPLE, G, target=many).block_dim == plan_of(EXAMPLE, G).block_dim == 8
    assert heads_a_core(EXAMPLE, 8) == 4


def test_the_documents_example_dots() -> None:
    assert n_dot_groups(EXAMPLE) == 2
    assert dots_a_tile_token(EXAMPLE, 16) == 32
    assert dots_a_tile_token(EXAMPLE, 128) == 256, "with the true V tile"
    for v_step in (16, 128):
        assert head_counts(1, EXAMPLE, plan_of(EXAMPLE, G, v_step=v_step).tiling).dots == 256


def test_the_documents_example_writes() -> None:
    counts = head_counts(1, EXAMPLE, plan_of(EXAMPLE, G, v_step=16).tiling)
    assert (counts.state_writes, counts.attn_writes, counts.writes) == (128, 8, 136)
    assert counts.state_write_bytes == 256
    true = head_counts(1, EXAMPLE, plan_of(EXAMPLE, G).tiling)
    assert (true.state_writes, true.attn_writes, true.writes) == (128, 1, 129)


def test_the_documents_example_barriers() -> None:
    """Two behind every token's transfers out in every tile, whatever the queues' depth."""
    for n_tokens in (1, 8):
        illustrative = head_counts(n_tokens, EXAMPLE, plan_of(EXAMPLE, G, v_step=16).tiling)
        assert illustrative.store_barriers == 2 * n_tokens * 8
        true = head_counts(n_tokens, EXAMPLE, plan_of(EXAMPLE, G).tiling)
        assert true.store_barriers == 2 * n_tokens
        assert true.hidden_attn_writes == n_tokens - 1, "depth 2 hides at most L - 1 transfers a tile"
    vector = plan_of(EXAMPLE, GateForm(True, "vector")).tiling
    assert head_counts(8, EXAMPLE, vector).hidden_attn_writes == 0, "depth 1 hides none"


def test_the_documents_example_bytes() -> None:
    assert state_slot_bytes(EXAMPLE, 16) == 4096, "the document's 4 KiB a slot"
    assert state_slot_bytes(EXAMPLE, 128) == 32768, "with the true V tile"
    for v_step in (16, 128):
        shallow, deep = (at_width(EXAMPLE, G, Profile(n, n), v_step, UB_310P) for n in (1, 2))
        more = state_slot_bytes(EXAMPLE, v_step) + 2 * v_step
        assert shallow.rest_bytes - deep.rest_bytes == more, "a second buffer in both queues"
        queues = PoolLedger.for_step(EXAMPLE, G, deep, UB_310P)
        assert queues["state_out"].n_bytes == 2 * state_slot_bytes(EXAMPLE, v_step)
        assert queues["attn_out"].n_bytes == 2 * 2 * v_step
        ledger = PoolLedger.for_step(EXAMPLE, G, shallow, UB_310P)
        assert ledger["state_queue"].n_bytes == ledger["state_out"].n_bytes == state_slot_bytes(EXAMPLE, v_step)
        assert ledger["state"].n_bytes == 2 * state_slot_bytes(EXAMPLE, v_step)


def test_the_documents_example_a_vector_gk_costs_a_buffer_and_bytes() -> None:
    """More than a scalar one: 2 * 8 * align(Dk) bytes in the document, truly 4 * 8 * (align(Dk) - align(Nv))."""
    scalar, vector = (fixed_bytes(EXAMPLE, GateForm(False, form)) for form in ("scalar", "vector"))
    assert vector - scalar == 4 * 8 * (128 - 32)
    buffers = [queue_buffers(GateForm(False, form), Profile(1, 1)) for form in ("scalar", "vector")]
    assert buffers == [7, 8]


def test_the_machine_is_the_documents_table() -> None:
    """Its eight rows; its row 7 joins the two steps that take the next tile."""
    steps = [(s.queue_slot, s.ub_copy, s.queue) for s in machine_steps(2)]
    assert steps[:9] == [
        ("tile 0 (fp16)", "stale", "full"),
        ("empty", "stale", "empty"),
        ("empty", "tile 0 (fp32)", "empty"),
        ("empty", "tile 0 (fp32)", "empty"),
        ("empty", "tile 0 (fp32)", "free"),
        ("tile 1 (fp16)", "tile 0 (fp32)", "full"),
        ("tile 1 (fp16)", "tile 0, moved on", "full"),
        ("empty", "tile 0, moved on", "empty"),
        ("empty", "tile 1 (fp32)", "empty"),
    ]
    assert [s.action for s in machine_steps(2)][:8] == [
        "prefetch tile 0",
        "take tile 0 out",
        "widen tile 0",
        "wait: vector before transfer in",
        "give the slot back",
        "prefetch tile 1",
        "all tokens of tile 0",
        "take tile 1 out",
    ]


@pytest.mark.parametrize("n_tiles", [0, 1, 2, 3, 9])
def test_the_machine_takes_every_tile_once_and_never_overwrites_a_full_slot(n_tiles: int) -> None:
    steps = list(machine_steps(n_tiles))
    actions = [step.action for step in steps]
    for what in ("prefetch tile {}", "take tile {} out", "widen tile {}", "all tokens of tile {}"):
        assert [a for a in actions if a in {what.format(i) for i in range(n_tiles)}] == [
            what.format(i) for i in range(n_tiles)
        ]
    before = "free"
    for step in steps:
        if step.action.startswith("prefetch"):
            assert before == "free"
        before = step.queue
    assert before == "free"


def test_explain_prints_the_machines_table() -> None:
    text = plan_of(sizes(32, 128, 128), G, v_step=64).explain()
    assert "   5  prefetch tile 1                  tile 1 (fp16)  tile 0 (fp32)     full\n" in text
    assert "   6  all tokens of tile 0             tile 1 (fp16)  tile 0, moved on  full\n" in text
    assert "256 dots, 128 a token and full V tile, each of 2 group(s) of 64" in text
    assert "130 transfers out: 128 state rows of 256 bytes and 2 output(s), 0 of these behind the next token" in text
    assert "4 barriers behind transfers out, 3 before transfers in" in text
    assert "  <- taken, with the v_step of 64 that was asked for" in text
    assert "and so on to step" not in text
    assert "and so on to step 47, tile 7" in plan_of(sizes(32, 128, 128), G, v_step=16).explain()
