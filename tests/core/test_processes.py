"""The package within real programs: cold starts, other libraries' threads, memory, quiet after a call."""

import importlib.util
from pathlib import Path

import numba
import pytest

from processes import CALLS, run_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads"),
]
LAYERS = pytest.mark.parametrize("layer", ["omp", "workqueue"])


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where a library is missing."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def test_t112_code_kept_under_eight_threads_serves_other_numbers(tmp_path: Path) -> None:
    entry = """
import sys
from typing import Any, NamedTuple
import numba, numpy as np
from cgdr_numba.core.entry import INTEGERS, Entry


class Arguments(NamedTuple):
    x: Any


def run_bin(b, a):
    a.x[b] = 3 * b


entry = Entry(run_bin, lambda: Arguments(INTEGERS))
x = np.zeros(40, np.int64)
entry(40, Arguments(x))
print(np.array_equal(x, 3 * np.arange(40)), entry.loaded, numba.config.NUMBA_NUM_THREADS)
"""
    folder = {"CGDR_NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_process("", calls=entry, NUMBA_NUM_THREADS="8", **folder) == "True False 8\n"
    for n in ("1", "2", "16"):
        assert run_process("", calls=entry, NUMBA_NUM_THREADS=n, **folder) == f"True True {n}\n"


def test_t112_calls_give_the_same_bits_under_other_numbers() -> None:
    code = "print(run().hex())"
    assert len({run_process(code, NUMBA_NUM_THREADS=n) for n in ("8", "1", "2", "16")}) == 1


COUNTED = """
import time
begin = time.perf_counter()
from numba.core import event


class Counter(event.Listener):
    kinds = []

    def on_start(self, event):
        self.kinds.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event):
        pass


event.register("numba:compile", Counter())
"""


def test_t113_import_compiles_nothing_and_one_call_each_is_enough() -> None:
    """Other strides, dtypes, batches, lengths, layouts and options use what the first calls compiled or loaded."""
    code = """
imported = time.perf_counter() - begin
print(Counter.kinds)
run()
Counter.kinds.clear()
bf16 = __import__("ml_dtypes").bfloat16
for dtype in (np.float16, bf16, np.float32):
    for gate in (np.float16, bf16, np.float32, np.float64):
        x = [a.astype(dtype) for a in (q, k, v)]
        chunk_gated_delta_rule(*x, **{name: a.astype(gate) for name, a in gates.items()}, use_qk_l2norm_in_kernel=True)
        state = np.zeros((1, 4, 24, 16), gate)
        fused_recurrent_gated_delta_rule(*x, g=gates["g"], initial_state=state, state_v_first=True, threads=1)
wide = np.asfortranarray(np.repeat(q, 3, axis=0))[:, ::-1]
wide.setflags(write=False)
raw = np.zeros(wide.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(wide.shape)
for x in (wide, raw, wide.swapaxes(1, 2), wide[:, :1], wide[:2, :, :2], wide[:0]):
    for options in ({}, {"threads": 2}, {"state_v_first": True, "output_final_state": True}):
        chunk_gated_delta_rule(x, x, x, **options)
        fused_recurrent_gated_delta_rule(x, x, x, **options)
chunk_gated_delta_rule(q, k, v, cu_seqlens=np.array([0, 3, 3, 40], np.uint8))
print(Counter.kinds, f"imported in {imported:.2f} s")
"""
    first, then = run_process(code, calls=COUNTED + CALLS).splitlines()
    assert first == "[]"
    assert then.startswith("[] imported in ")
    print(then)


@needs("joblib")
@LAYERS
def test_t115_within_joblib_threads(layer: str) -> None:
    code = """
import joblib
expected = run(threads=1)
found = joblib.Parallel(n_jobs=4, backend="threading")(joblib.delayed(run)(threads=1 + i % 2) for i in range(100))
print(len(found), all(x == expected for x in found))
"""
    assert run_process(code, NUMBA_THREADING_LAYER=layer) == "100 True\n"


@LAYERS
def test_t115_within_a_parallel_loop_of_numba(layer: str) -> None:
    code = """
import numba
from cgdr_numba import last_call
expected, seen = run(threads=2), set()


def is_right():
    found = run(threads=2) == expected
    seen.add(last_call().serial)
    return float(found)


@numba.njit(parallel=True)
def loop(n):
    right = np.zeros(n)
    for i in numba.prange(n):
        with numba.objmode(found="float64"):
            found = is_right()
        right[i] = found
    return right


print(loop(12).sum(), sorted(seen), run(threads=2) == expected, last_call().serial)
"""
    serial = "['in a parallel loop']" if layer == "workqueue" else "['']"
    assert run_process(code, NUMBA_THREADING_LAYER=layer) == f"12.0 {serial} True \n"


@needs("torch")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_t115_within_workers_of_a_data_loader(method: str, tmp_path: Path) -> None:
    """The data set stands in a module of its own, which workers that are not forked import."""
    module = f"""{CALLS}
import torch


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(run(threads=2)), dtype=torch.uint8)
"""
    (tmp_path / "data_of_calls.py").write_text(module)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import data_of_calls
if __name__ == "__main__":
    expected = data_of_calls.run(threads=2)
    loader = data_of_calls.torch.utils.data.DataLoader(
        data_of_calls.Data(), batch_size=None, num_workers=2, multiprocessing_context={method!r})
    found = [bytes(x.numpy()) for x in loader]
    print(len(found), all(x == expected for x in found))
"""
    assert run_process(code, calls="", PYTHONWARNINGS="ignore") == "8 True\n"


def test_t124_memory_does_not_grow() -> None:
    code = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def call():
    t, hk, dk, dv = (int(rng.integers(1, n)) for n in (400, 5, 80, 80))
    x = rng.standard_normal((2, t, hk, dk)).astype(np.float32)
    y = rng.standard_normal((2, t, 2 * hk, dv)).astype(np.float32)
    chunk_gated_delta_rule(x, x, y, use_qk_l2norm_in_kernel=True, output_final_state=True)
    fused_recurrent_gated_delta_rule(x[:, :3], x[:, :3], y[:, :3], output_final_state=True)


run()
for _ in range(20):
    call()
before = resident()
for _ in range(180):
    call()
print(resident() - before)
"""
    assert float(run_process(code)) < 5.0


@needs("torch")
@needs("sklearn")
@LAYERS
@pytest.mark.parametrize("when", ["before", "after"])
def test_t125_beside_other_copies_of_openmp(when: str, layer: str) -> None:
    """Bits and the threads that loops really run on are the same before and after the others' work."""
    code = f"""
import numba


def others():
    import torch
    from sklearn.cluster import KMeans
    torch.ones(300, 300) @ torch.ones(300, 300)
    KMeans(3, n_init=1).fit(np.random.default_rng(0).random((2000, 4)))


@numba.njit(parallel=True)
def threads_used(n):
    used = np.zeros(n, np.int64)
    for i in numba.prange(n):
        used[i] = numba.get_thread_id()
    return used


if {when == "before"}:
    others()
expected = run(threads=2)
seen = [threads_used(2).tolist()]
others()
print(run(threads=2) == run(threads=1) == expected, *seen, threads_used(2).tolist())
"""
    found = run_process(code, NUMBA_THREADING_LAYER=layer, PYTHONWARNINGS="ignore")
    assert found == "True [0, 1] [0, 1]\n"


@LAYERS
def test_t133_threads_sleep_after_a_call(layer: str) -> None:
    """Seconds of processor time within half a second that begins half a second after a call."""
    code = """
import time
for _ in range(50):
    run(threads=2)
time.sleep(0.5)
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""
    assert float(run_process(code, NUMBA_THREADING_LAYER=layer)) < 0.1


def test_soak_for_some_seconds() -> None:
    """``bench/soak.py`` in small: several Python threads, mixed calls, the bits of one thread."""
    code = """
import json
from soak import main
code = main(["--minutes", "0.1", "--cases", "30"])
assert code == 0, code
"""
    bench = str(Path(__file__).parents[2] / "bench")
    assert '"differences": 0' in run_process(f"sys.path.insert(0, {bench!r})\n" + code)
