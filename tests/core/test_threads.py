"""Threads in real programs, each in a process of its own: forks, several Python threads, missing layers."""

import os
import shutil

import numba
import numpy as np
import pytest

from processes import run_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads"),
]


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_t103_a_forked_child_gives_the_same_bits(layer: str) -> None:
    """GNU OpenMP would end a forked child that uses its threads: it runs on one, and says so once."""
    code = """
from cgdr_numba import Dims, last_call, plan_chunk
expected = run(threads=2)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = [run(threads=2) == expected, run() == expected, run("faithful") == faithful]
    plan = plan_chunk(Dims(40, 1, 4, 4, 16, 24), [40], backend="fast", threads=2)
    chunk_gated_delta_rule(q, k, v, **gates, plan=plan)
    os.write(writing, f"{same} [{last_call().serial}] {[str(w.message) for w in caught]}".encode())
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, os.read(reading, 9999).decode())
print(run(threads=2) == expected)
""".replace("expected = run(threads=2)", 'expected = run(threads=2); faithful = run("faithful")')
    first, second = run_process(code, NUMBA_THREADING_LAYER=layer).splitlines()
    assert first.startswith(f"0 [True, True, True] [{'forked' if layer == 'omp' else ''}] ")
    assert second == "True"
    told = "forked from one that runs OpenMP threads" in first
    assert told == (layer == "omp")
    assert first.count("running on one thread") == told


def test_the_default_follows_the_affinity_mask() -> None:
    """Whether the process starts tied to one core, or is tied to one before its first call."""
    tie = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code = """
import numba
from cgdr_numba import last_call
from cgdr_numba.core.cores import cores
expected = run(threads=2)
print(last_call().threads, run() == expected, cores().affinity, last_call().threads, numba.get_num_threads())
"""
    assert run_process(tie + code) == "2 True 1 1 2\n"
    if shutil.which("taskset"):
        core = str(min(os.sched_getaffinity(0)))
        assert run_process(code, before=("taskset", "-c", core)) == "2 True 1 1 2\n"


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_t104_four_python_threads_at_once(layer: str) -> None:
    code = """
expected, wrong = run(threads=2), []


def work():
    for i in range(60):
        if run(threads=1 + i % 2) != expected:
            wrong.append(i)


workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print(len(wrong))
"""
    assert run_process(code, NUMBA_THREADING_LAYER=layer) == "0\n"


def test_a_missing_layer_is_named_and_one_thread_serves() -> None:
    code = """
from cgdr_numba import Dims, last_call, plan_chunk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    same = run() == run(threads=2)
    plan = plan_chunk(Dims(40, 1, 4, 4, 16, 24), [40], backend="fast", threads=2)
    chunk_gated_delta_rule(q, k, v, **gates, plan=plan)
    print(same, last_call().serial, len(caught), caught[0].category.__name__, caught[0].message)
"""
    found = run_process(code, NUMBA_THREADING_LAYER="tbb")
    if "starts no threads" not in found:
        pytest.skip("tbb is installed here")
    assert found.startswith("True no threading layer 1 RuntimeWarning cgdr_numba: numba starts no threads (")
    assert found.endswith("running on one thread\n")


def test_t106_a_threads_own_number_is_respected_and_left_alone() -> None:
    code = """
import numba
numba.set_num_threads(1)
run(threads=2)
seen = [numba.get_num_threads()]


def work():
    seen.append(numba.get_num_threads())
    run(threads=1)
    seen.append(numba.get_num_threads())


worker = threading.Thread(target=work)
worker.start()
worker.join()
print(seen)
"""
    assert run_process(code) == "[1, 2, 2]\n"


def test_t107_a_call_leaves_settings_as_they_are() -> None:
    code = """
import numba


def settings():
    return numba.get_num_threads(), np.geterr(), list(warnings.filters), dict(os.environ)


before = settings()
run(threads=1)
print(before == settings(), np.float32(1e-39) * np.float32(0.5) > 0)
"""
    assert run_process(code) == "True True\n"


def test_t122_other_python_threads_run_on() -> None:
    code = """
import time
big = [np.repeat(x, 400, axis=1) for x in (q, k, v)]
wide = {name: np.repeat(x, 400, axis=1) for name, x in gates.items()}
chunk_gated_delta_rule(*big, **wide)
count, stop = [0], []


def work():
    while not stop:
        count[0] += 1
        time.sleep(0)


worker = threading.Thread(target=work)
worker.start()
time.sleep(0.05)
before = count[0]
for _ in range(5):
    chunk_gated_delta_rule(*big, threads=1, **wide)
moved = count[0] - before
stop.append(1)
worker.join()
print(moved > 50)
"""
    assert run_process(code) == "True\n"


def test_results_do_not_depend_on_the_layer() -> None:
    code = "print(run(threads=2).hex())"
    assert len({run_process(code, NUMBA_THREADING_LAYER=layer) for layer in ("omp", "workqueue")}) == 1
    assert np.isfinite(np.frombuffer(bytes.fromhex(run_process(code).strip()), np.float32)).all()
