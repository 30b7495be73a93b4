"""Python code in a process of its own, with small calls at hand."""

import os
import subprocess
import sys
from pathlib import Path

import cgdr_numba

ROOT = Path(cgdr_numba.__file__).resolve().parents[1]
CALLS = """
import os, sys, threading, warnings
import numpy as np
from cgdr_numba import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

rng = np.random.default_rng(0)
q, k = (rng.standard_normal((1, 40, 4, 16)) / 4 for _ in range(2))
v = rng.standard_normal((1, 40, 4, 24))
q, k, v = (x.astype(np.float32) for x in (q, k, v))
gates = {"g": -rng.random((1, 40, 4)), "beta": rng.random((1, 40, 4))}


def run(backend="fast", **options):
    out, state = chunk_gated_delta_rule(q, k, v, backend=backend, output_final_state=True, **gates, **options)
    step, _ = fused_recurrent_gated_delta_rule(q[:, :1], k[:, :1], v[:, :1],
        **{name: x[:, :1] for name, x in gates.items()}, initial_state=state, **options)
    return out.tobytes() + state.tobytes() + step.tobytes()
"""


def run_process(code: str, before: tuple[str, ...] = (), calls: str = CALLS, **environment: str) -> str:
    """What a new process prints that runs the calls and the code; `before` is a command that starts it."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_NUM_THREADS": "2", **environment}
    command = [*before, sys.executable, "-c", calls + code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout
