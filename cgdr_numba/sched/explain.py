"""A plan in words."""

from typing import TYPE_CHECKING

from cgdr_numba.sched.tiling import workspace_bytes, workspace_stride

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from cgdr_numba.sched.plan import Plan


def explain_chunk(plan: "Plan") -> str:
    """Return the text of a chunked call's plan: launch, ledger, bins."""
    return "\n".join([*_launch_lines(plan), "", str(plan.tiling.ledger), "", *_bin_lines(plan)])


def _launch_lines(plan: "Plan") -> "Iterator[str]":
    """Yield what the host decides before the launch."""
    dims, tiling, values = plan.key.dims, plan.tiling, plan.as_dict()
    yield values["revision"] + (" - extension: the NPU takes float16 only" if plan.extension else "")
    yield f"device {plan.device.name}: {plan.device.cores} cores, {plan.device.ub_bytes} bytes of UB a core"
    yield (
        f"T {dims.n_tokens} in {dims.n_sequences} sequences, Hk {dims.hk}, Hv {dims.hv}, Dk {dims.dk}, Dv {dims.dv}, "
        f"{plan.key.dtype}"
    )
    walk = "each an item of its own" if tiling.split else "walked by one item"
    yield f"v_step {tiling.v_step}: {tiling.n_v_tiles} V tile(s) a head, {walk}; block_dim {tiling.block_dim}"
    key_path = "DMA" if values["k_dma"] else "element reads"
    query_path = "cached" if values["q_cached"] else "read again for every row of scores"
    if plan.n_rows:
        yield f"chunks of up to {plan.n_rows} rows: K by {key_path}, Q {query_path}"
    use = "" if plan.carries_state else ", unused: no second chunk"
    yield (
        f"workspace FP32 [{dims.n_sequences}, {dims.hv}, {dims.dk}, {workspace_stride(dims)}] = "
        f"{workspace_bytes(dims)} bytes{use} (the NPU asks for {values['npu_workspace_bytes']})"
    )


def _bin_lines(plan: "Plan") -> "Iterator[str]":
    """Yield every bin's load and items, and how even the loads are."""
    tokens = plan.bin_tokens()
    for b, load in enumerate(tokens):
        first, last = plan.items[plan.bin_ptr[b]], plan.items[plan.bin_ptr[b + 1] - 1]
        n_items = plan.bin_ptr[b + 1] - plan.bin_ptr[b]
        yield f"bin {b}: {load} tokens, items {_item_name(first)} .. {_item_name(last)} ({n_items})"
    if tokens:
        yield f"balance: mean load / largest load over {plan.tiling.block_dim} cores = {plan.balance():.3f}"
    else:
        yield "no bins: no tokens"


def _item_name(item: "NDArray[np.int64]") -> str:
    """Return (sequence, head, tile) as text; `*` stands for every tile."""
    sequence, head, tile = item.tolist()
    return f"({sequence}, {head}, {'*' if tile < 0 else tile})"
