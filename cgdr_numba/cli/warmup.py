"""`cgdr warmup`: compile kernels now, so that no later process does."""

from typing import Annotated, Any

import typer

from cgdr_numba.cli.console import errors_in_a_line, print_table, print_text
from cgdr_numba.core.cache import FOLDER_VARIABLE, cache_folder
from cgdr_numba.core.entry import Entry, parallel_loop
from cgdr_numba.core.faithful.pool_worker import walk_cores, walk_cores_optioned
from cgdr_numba.core.faithful.worker import walk_bins, walk_bins_optioned
from cgdr_numba.core.fast.channel_worker import walk_channels
from cgdr_numba.core.fast.chunk_worker import walk_chunks
from cgdr_numba.core.fast.pool_worker import walk_pool
from cgdr_numba.core.fast.step_worker import walk_steps
from cgdr_numba.core.gates import walk_gates
from cgdr_numba.core.jit import Compiled
from cgdr_numba.errors import ContractError

_KERNELS: dict[str, tuple[tuple[str, Compiled | Entry[Any]], ...]] = {
    "fast": (
        ("prefill", walk_chunks),
        ("decode", walk_steps),
        ("gates of channels and columns", walk_channels),
        ("pool", walk_pool),
        ("raw gates", walk_gates),
        ("parallel loop", parallel_loop),
    ),
    "faithful": (
        ("prefill, default arithmetic", walk_bins),
        ("prefill, axpy and overflow options", walk_bins_optioned),
        ("pool, default arithmetic", walk_cores),
        ("pool, overflow option", walk_cores_optioned),
    ),
}


def warmup(
    backend: Annotated[str, typer.Option(help="fast, faithful or all.")] = "fast",
) -> None:
    """Compile kernels and keep them on disk.

    A kernel is compiled once for all dtypes, layouts, strides and sizes, so nothing compiles in a server that was
    warmed up on the same machine.
    """
    with errors_in_a_line():
        chosen = list(_KERNELS) if backend == "all" else [backend]
        if any(name not in _KERNELS for name in chosen):
            raise ContractError(f"`--backend` must be fast, faithful or all, got {backend!r}")
        rows = []
        for name in chosen:
            for what, kernel in _KERNELS[name]:
                if isinstance(kernel, Entry):
                    kernel.compile(with_kept=True)
                else:
                    kernel.compile()
                seconds = "-" if kernel.compile_seconds is None else f"{kernel.compile_seconds:.2f} s"
                rows.append((name, what, seconds, "loaded from disk" if kernel.loaded else "compiled"))
    print_table(("backend", "kernel", "time", ""), rows)
    folder = cache_folder()
    print_text(f"kept in {folder}" if folder else f"kept nowhere: {FOLDER_VARIABLE} is empty")
