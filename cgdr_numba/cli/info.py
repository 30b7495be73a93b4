"""`cgdr info`: versions, machine, numba's settings, compile cache, backends, targets."""

import platform
from importlib.metadata import version
from typing import Annotated, Any

import llvmlite.binding
import numba
import numpy as np
import typer

import cgdr_numba
from cgdr_numba.cli.console import print_json, print_progress, print_text
from cgdr_numba.core.cache import FOLDER_VARIABLE, cache_folder
from cgdr_numba.core.cores import cores
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.core.served import Served, last_call
from cgdr_numba.core.threads import current_threads, layer_name, most_threads
from cgdr_numba.ops import (
    BACKENDS,
    POOL_BACKENDS,
    RECURRENT_BACKENDS,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from cgdr_numba.sched.device import ASCEND_310P, host
from cgdr_numba.sched.plan import REVISION
from cgdr_numba.sched.pool_plan import POOL_REVISION


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False,
    is_tried: Annotated[
        bool, typer.Option("--try", help="Run a small prefill and decode, and show which path served them.")
    ] = False,
) -> None:
    """Show versions, machine, settings and targets.

    A report about this package should hold what is printed here.
    """
    facts = _facts()
    if is_tried:
        print_progress("running fast, which compiles for some seconds where no compiled code is kept")
        facts["served"] = {name: None if call is None else call._asdict() for name, call in _try_calls().items()}
    if as_json:
        print_json(facts)
    else:
        print_text(_text(facts))


def _facts() -> dict[str, Any]:
    """Return everything as plain values."""
    folder = cache_folder()
    return {
        "cgdr_numba": cgdr_numba.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "llvmlite", "scipy")},
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name(),
        "cores": cores().machine,
        "affinity_cores": cores().affinity,
        "quota_cores": cores().quota,
        "usable_cores": cores().usable,
        "threading_layer": layer_name() or "none",
        "threads": current_threads(),
        "most_threads": most_threads(),
        "jit": not numba.config.DISABLE_JIT,
        "cache_folder": None if folder is None else str(folder),
        "backends": list(BACKENDS),
        "recurrent_backends": list(RECURRENT_BACKENDS),
        "pool_backends": list(POOL_BACKENDS),
        "instruction_set": instruction_set().name,
        "revision": REVISION,
        "pool_revision": POOL_REVISION,
        "targets": [
            {"name": device.name, "cores": device.cores, "ub_bytes": device.ub_bytes, "source": device.source}
            for device in (ASCEND_310P, host())
        ],
    }


def _try_calls() -> dict[str, Served | None]:
    """Run a prefill and a decode step of two heads, and return which path served each."""
    heads, gates = np.ones((1, 64, 2, 16), np.float32), np.zeros((1, 64, 2), np.float32)
    chunk_gated_delta_rule(heads, heads, heads, gates, gates)
    prefill = last_call()
    q, g = heads[:, :1], gates[:, :1]
    fused_recurrent_gated_delta_rule(q, q, q, g=g, beta=g)
    return {"prefill": prefill, "decode": last_call()}


def _text(facts: dict[str, Any]) -> str:
    """Return the facts for people, a line each."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "numpy", "numba", "llvmlite", "scipy"))
    kernels = "kernels compiled" if facts["jit"] else "kernels as plain Python (NUMBA_DISABLE_JIT=1)"
    lines = {
        "cgdr_numba": facts["cgdr_numba"],
        "versions": versions,
        "machine": f"{facts['machine']}, {facts['cpu']} as LLVM names it",
        "cores": f"{facts['cores']}, {facts['affinity_cores']} in the affinity mask, "
        f"{'no quota' if facts['quota_cores'] is None else 'a quota of {:.2f}'.format(facts['quota_cores'])}",
        "threads": f"{facts['threads']} by default, up to {facts['most_threads']} by threads=",
        "numba": f"threading layer {facts['threading_layer']}, {kernels}",
        "cache": facts["cache_folder"] or f"off ({FOLDER_VARIABLE} is empty)",
        "backends": f"{', '.join(facts['backends'])}; recurrent: {', '.join(facts['recurrent_backends'])}; "
        f"over a pool: {', '.join(facts['pool_backends'])}",
        "fast": f"instruction set {facts['instruction_set']}",
        "kernels": f"{facts['revision']}; {facts['pool_revision']}",
    }
    targets = {
        f"target {device['name']}": f"{device['cores']} core(s), {device['ub_bytes']} bytes of UB a core "
        f"({device['source']})"
        for device in facts["targets"]
    }
    served = {name: _served_text(call) for name, call in facts.get("served", {}).items()}
    return "\n".join(f"{name:<12} {value}" for name, value in {**lines, **targets, **served}.items())


def _served_text(call: dict[str, Any] | None) -> str:
    """Return which path served a call, for people."""
    if call is None:
        return "unknown"
    why = f" ({call['serial']})" if call["serial"] else ""
    return (
        f"backend {call['backend']}, worker {call['worker']}, {call['bins']} bin(s) on {call['threads']} thread(s){why}"
    )
