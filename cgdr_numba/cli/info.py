"""`cgdr info`: versions, machine, numba's settings, compile cache, backends, targets."""

import platform
from importlib.metadata import version
from typing import Annotated, Any

import llvmlite.binding
import numba
import typer

import cgdr_numba
from cgdr_numba.cli.console import print_json, print_text
from cgdr_numba.core.cache import FOLDER_VARIABLE, cache_folder
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.core.threads import layer_name, most_threads
from cgdr_numba.ops import BACKENDS, POOL_BACKENDS, RECURRENT_BACKENDS
from cgdr_numba.sched.device import ASCEND_310P, host, usable_cores
from cgdr_numba.sched.plan import REVISION
from cgdr_numba.sched.pool_plan import POOL_REVISION


def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, in one line.")] = False) -> None:
    """Show versions, machine, settings and targets.

    A report about this package should hold what is printed here.
    """
    facts = _facts()
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
        "usable_cores": usable_cores(),
        "threading_layer": layer_name() or "none",
        "threads": numba.get_num_threads(),
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


def _text(facts: dict[str, Any]) -> str:
    """Return the facts for people, a line each."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "numpy", "numba", "llvmlite", "scipy"))
    kernels = "kernels compiled" if facts["jit"] else "kernels as plain Python (NUMBA_DISABLE_JIT=1)"
    lines = {
        "cgdr_numba": facts["cgdr_numba"],
        "versions": versions,
        "machine": f"{facts['machine']}, {facts['cpu']} as LLVM names it, {facts['usable_cores']} usable core(s)",
        "numba": f"{facts['threads']} thread(s), threading layer {facts['threading_layer']}, {kernels}",
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
    return "\n".join(f"{name:<12} {value}" for name, value in {**lines, **targets}.items())
