"""A plan in words."""

from typing import TYPE_CHECKING

from cgdr_numba.core.dims import FAST_CHUNK
from cgdr_numba.core.fast.chunk_worker import FEW
from cgdr_numba.sched.tiling import workspace_bytes, workspace_stride

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from cgdr_numba.sched.host_plan import HostPlan
    from cgdr_numba.sched.plan import Plan


def explain_chunk(plan: "Plan") -> str:
    """Return the text of a chunked call's plan: launch, ledger, bins."""
    return "\n".join([*_launch_lines(plan), "", str(plan.tiling.ledger), "", *_bin_lines(plan)])


def explain_host(plan: "HostPlan") -> str:
    """Return the text of fast's plan: tiles, scratch, bins."""
    return "\n".join([*_host_lines(plan), "", *_host_bin_lines(plan)])


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


def _host_lines(plan: "HostPlan") -> "Iterator[str]":
    """Yield what is decided before fast's launch."""
    dims = plan.key.dims
    n_shared = dims.hv // dims.hk
    yield "fast: float32 vector code; another plan changes the time and no bit of the results"
    yield f"host: at most {plan.n_threads} thread(s), {plan.cache_bytes} bytes of cache a core"
    yield (f"T {dims.n_tokens} in {dims.n_sequences} sequences, Hk {dims.hk}, Hv {dims.hv}, Dk {dims.dk}, Dv {dims.dv}")
    yield f"width {plan.width}: {plan.n_v_tiles} V tile(s) a head, each an item of its own"
    yield (
        f"items are (sequence, key head, part); a part is a V tile of {plan.n_together} of the key head's {n_shared} "
        "value head(s)"
    )
    yield f"chunks of {FAST_CHUNK} tokens; the last one of a sequence takes the token loop where it has up to {FEW}"
    over = "" if plan.arena_bytes <= plan.cache_bytes else ": more than the cache, and no V tile is narrower"
    yield f"scratch of {plan.arena_bytes} bytes a bin{over}"


def _host_bin_lines(plan: "HostPlan") -> "Iterator[str]":
    """Yield every bin's load and items, and how even the loads are."""
    loads = plan.bin_loads()
    for b, (load, tokens) in enumerate(zip(loads, plan.bin_tokens(), strict=True)):
        first, last = plan.items[plan.bin_ptr[b]], plan.items[plan.bin_ptr[b + 1] - 1]
        n_items = plan.bin_ptr[b + 1] - plan.bin_ptr[b]
        yield f"bin {b}: load {load}, {tokens} tokens, items {_item_name(first)} .. {_item_name(last)} ({n_items})"
    if loads:
        yield "load: tokens x columns of the value heads, and columns for what heads and items cost by themselves"
        yield f"balance: mean load / largest load over {plan.n_threads} thread(s) = {plan.balance():.3f}"
    else:
        yield "no bins: no tokens"


def _item_name(item: "NDArray[np.int64]") -> str:
    """Return (sequence, head, tile) as text; `*` stands for every tile."""
    sequence, head, tile = item.tolist()
    return f"({sequence}, {head}, {'*' if tile < 0 else tile})"
