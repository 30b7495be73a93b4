"""Mixed random calls from several Python threads for minutes: the bits of one thread, and no growth of memory.

``python bench/soak.py --minutes 30`` prints what it saw, and ends with 1 where a result differed by a bit or resident
memory grew by more than 5 MiB after the first fifth of the time.
"""

import argparse
import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cgdr_numba import (
    RecurrentStep,
    chunk_gated_delta_rule,
    fused_gdn_gating,
    fused_recurrent_gated_delta_rule,
    npu_chunk_gated_delta_rule,
)
from cgdr_numba.core.threads import layer_name, most_threads

LIMIT_MIB = 5.0
"""Growth of resident memory that is still none."""
DTYPES = (np.float16, np.float32, ml_dtypes.bfloat16)
Run = Callable[[int | None], bytes]


class Case(NamedTuple):
    """A call with fixed arguments, and a hash of its results on one thread."""

    name: str
    run: Run
    """Runs it on so many threads (None: the default), and returns the hash."""
    expected: bytes


def digest(*arrays: Any) -> bytes:
    """A hash of the bits of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()


def make_run(rng: np.random.Generator) -> tuple[str, Run]:
    """A random call: function, backend, sizes, dtypes, layouts, lengths."""
    name = str(rng.choice(["prefill", "prefill", "recurrent", "recurrent", "decode", "faithful", "npu"]))
    hk, shared, dk, dv = (int(rng.choice(x)) for x in ([1, 2, 3, 4], [1, 2, 3], [8, 16, 50, 64], [16, 24, 64, 100]))
    hv = hk * shared
    lengths = rng.integers(0, 150, int(rng.integers(1, 5)))
    if name == "decode":
        lengths = np.ones(int(rng.integers(1, 5)), np.int64)
    elif name in ("faithful", "npu"):
        lengths = lengths // 3
    t, n = int(lengths.sum()), len(lengths)
    dtype = DTYPES[rng.integers(3)]
    q, k = (rng.standard_normal((1, t, hk, dk)).astype(dtype) for _ in range(2))
    v = rng.standard_normal((1, t, hv, dv)).astype(dtype)
    g = (-np.exp(rng.uniform(-6, 3)) * rng.random((1, t, hv))).astype(np.float32)
    beta = rng.random((1, t, hv)).astype(np.float32)
    v_first = bool(rng.integers(2))
    state = rng.standard_normal((n, hv, *((dv, dk) if v_first else (dk, dv)))).astype(np.float32)
    options: dict[str, Any] = {
        "initial_state": state,
        "state_v_first": v_first,
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }

    def prefill(threads: int | None) -> bytes:
        backend: Any = "faithful" if name == "faithful" else "fast"
        return digest(*chunk_gated_delta_rule(q, k, v, g, beta, backend=backend, threads=threads, **options))

    def recurrent(threads: int | None) -> bytes:
        return digest(*fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, threads=threads, **options))

    def decode(threads: int | None) -> bytes:
        given = [x.reshape(t, 1, *x.shape[2:]) for x in (q, k, v, g, beta)]
        moved = state.copy()
        a_log = np.zeros(hv, np.float32)
        given[3], given[4] = fused_gdn_gating(a_log, given[3], given[4], None)
        step = RecurrentStep(*given, moved, use_qk_l2norm_in_kernel=True, state_v_first=v_first, threads=threads)
        return digest(step(*given, moved), step(*given, moved), moved)

    def npu(threads: int | None) -> bytes:
        first = state if v_first else state.swapaxes(2, 3)
        arrays = {"beta": beta[0], "g": g[0], "initial_state": first, "actual_seq_lengths": lengths}
        return digest(*npu_chunk_gated_delta_rule(q[0], k[0], v[0], threads=threads, **arrays))

    runs = {"prefill": prefill, "recurrent": recurrent, "decode": decode, "faithful": prefill, "npu": npu}
    return name, runs[name]


def make_cases(n_cases: int, seed: int) -> list[Case]:
    """Calls with their results on one thread, each computed twice."""
    rng, cases = np.random.default_rng(seed), []
    for _ in range(n_cases):
        name, run = make_run(rng)
        cases.append(Case(name, run, run(1)))
        if run(1) != cases[-1].expected:
            raise SystemExit(f"soak: {name} differs from itself on one thread")
    return cases


def resident_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Soak:
    """Threads that call at random until the time is over."""

    def __init__(self, cases: list[Case], n_threads: int, seed: int) -> None:
        self.cases, self.counts = cases, dict.fromkeys(sorted({case.name for case in cases}), 0)
        self.lock = threading.Lock()
        self.samples: list[float] = []
        self.is_over = False
        self.workers = [threading.Thread(target=self.work, args=(seed + 1 + i,)) for i in range(n_threads)]
        self.wrong: list[str] = []

    def work(self, seed: int) -> None:
        """Call, and compare."""
        rng = np.random.default_rng(seed)
        choices = (None, *range(1, most_threads() + 1))
        while not self.is_over:
            case, threads = self.cases[rng.integers(len(self.cases))], choices[rng.integers(len(choices))]
            try:
                is_right = case.run(threads) == case.expected
                message = "" if is_right else f"{case.name} on {threads} threads differs"
            except Exception as error:
                message = f"{case.name} on {threads} threads raised {error!r}"
            with self.lock:
                self.counts[case.name] += 1
                if message:
                    self.wrong.append(message)

    def run(self, seconds: float) -> None:
        """Let the threads work so long, and look at memory meanwhile."""
        for worker in self.workers:
            worker.start()
        end, interval = time.monotonic() + seconds, min(1.0, seconds / 200)
        while time.monotonic() < end:
            time.sleep(interval)
            self.samples.append(resident_mib())
        self.is_over = True
        for worker in self.workers:
            worker.join()

    def growth_mib(self) -> float:
        """How far memory moved between the second fifth of the time and the last."""
        n = max(1, len(self.samples) // 5)
        return statistics.median(self.samples[-n:]) - statistics.median(self.samples[n : 2 * n])


def main(arguments: list[str] | None = None) -> int:
    """Run, print a summary as JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=3, help="Python threads that call")
    parser.add_argument("--cases", type=int, default=120, help="different calls")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    soak = Soak(make_cases(given.cases, given.seed), given.threads, given.seed)
    soak.run(60 * given.minutes)
    growth = soak.growth_mib()
    summary = {
        "minutes": given.minutes,
        "python_threads": given.threads,
        "layer": layer_name(),
        "numba_threads": most_threads(),
        "calls": sum(soak.counts.values()),
        "calls_by_kind": soak.counts,
        "differences": len(soak.wrong),
        "first_differences": soak.wrong[:5],
        "resident_mib": [round(x, 1) for x in soak.samples[:: max(1, len(soak.samples) // 20)]],
        "growth_mib": round(growth, 2),
    }
    print(json.dumps(summary))
    return int(bool(soak.wrong) or growth > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
