"""Bits that depend on nothing but the numbers: repeats, threads, strides, read-only memory, freed garbage."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import cgdr_numba
from cgdr_numba.core import memory
from judge import assert_same_bits, both_families, run_fla
from reference import Array, Case, make_case

TENSORS = ("q", "k", "v", "g", "beta", "state")
MOST_THREADS = int(numba.config.NUMBA_NUM_THREADS)
THREADS = sorted({n for n in (1, 2, 4, MOST_THREADS) if n <= MOST_THREADS})


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every array that the package allocates is full of other garbage than the one before."""
    allocate = memory.empty
    fills = iter(np.tile([np.nan, 1e30, -np.inf, 0.0, 7.0, -1e-38], 100_000))

    def filled(shape: tuple[int, ...], dtype: Any) -> Any:
        array = allocate(shape, dtype)
        with np.errstate(over="ignore"):
            array[...] = next(fills)
        return array

    monkeypatch.setattr(memory, "empty", filled)
    yield
    assert next(fills) is not None


@both_families
def test_t070_repeats_among_other_calls_give_the_same_bits(backend: str, run: Any, garbage: None) -> None:
    case = make_case(70, t=70, heads=(1, 3), dims=(8, 8))
    first = run(case, backend)
    for i in range(20):
        run(make_case(i, t=1 + 3 * i, heads=(1, 2), dims=(3 + i % 7, 5)), backend)
        assert_same_bits(run(case, backend), first)


@pytest.mark.parametrize("threads", THREADS)
def test_t070_threads_do_not_matter(backend: str, threads: int) -> None:
    case = make_case(70, t=80, heads=(2, 6), dims=(8, 12))
    first = run_fla(case, backend)
    before = numba.get_num_threads()
    for _ in range(20 if not numba.config.DISABLE_JIT else 1):
        assert_same_bits(run_fla(case, backend, threads=threads), first)
    assert numba.get_num_threads() == before


def test_t070_threads_outside_of_the_range_are_refused(backend: str) -> None:
    case = make_case(70, t=2)
    for threads in (0, -1, MOST_THREADS + 1):
        with pytest.raises(ValueError, match=rf"`threads` must be from 1 to numba's {MOST_THREADS} .* got {threads}"):
            run_fla(case, backend, threads=threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(1, 17, 64, 0, 65, 3, 130, 2, 31, 8, 70, 5, 40), (200,)], ids=["13-pieces", "one-piece"]
)
def test_t116_work_of_unequal_pieces_has_no_races(backend: str, lengths: tuple[int, ...]) -> None:
    # One long piece has all of its heads, and what they carry from chunk to chunk, at work at the same time.
    case = make_case(116, t=sum(lengths), heads=(7, 7), dims=(16, 8), cu=np.cumsum((0, *lengths)))
    alone = run_fla(case, backend, threads=1)
    for _ in range(50):
        assert_same_bits(run_fla(case, backend, threads=MOST_THREADS), alone)


def digest(case: Case) -> str:
    """A hash over every input."""
    return hashlib.sha256(b"".join(getattr(case, name).tobytes() for name in TENSORS)).hexdigest()


@both_families
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_t098_calling_twice_changes_nothing(backend: str, run: Any, dtype: type) -> None:
    case = make_case(98, t=67, heads=(2, 4), dims=(9, 7), dtype=dtype)
    before = digest(case)
    first = run(case, backend)
    kept = first._replace(out=first.out.copy(), state=first.state.copy())
    assert_same_bits(run(case, backend), kept)
    run(make_case(99, t=5, heads=(3, 3), dims=(20, 30)), backend)
    assert_same_bits(run(case, backend), kept)
    assert_same_bits(first, kept)
    assert digest(case) == before


@both_families
def test_t098_float64_inputs_are_not_worked_in(run: Any) -> None:
    case = make_case(98, t=5, dtype=np.float64)
    before = digest(case)
    run(case, "golden")
    assert digest(case) == before


@both_families
def test_t098_results_share_no_memory(backend: str, run: Any) -> None:
    case = make_case(98, t=5)
    first, second = run(case, backend), run(case, backend)
    arrays = [first.out, first.state, second.out, second.state]
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, getattr(case, name)) for name in TENSORS)
        assert not any(np.shares_memory(array, other) for other in arrays[i + 1 :])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_t089_slices_of_one_buffer(backend: str, dtype: type) -> None:
    case = make_case(89, t=70, heads=(2, 4), dims=(6, 5), dtype=dtype)
    fused = np.concatenate([x.reshape(70, -1) for x in (case.q, case.k, case.v)], axis=1)
    before = fused.copy()
    q, k, v = np.split(fused, [12, 24], axis=1)
    sliced = case.but(q=q.reshape(1, 70, 2, 6), k=k.reshape(1, 70, 2, 6), v=v.reshape(1, 70, 4, 5))
    assert np.shares_memory(sliced.q, fused)
    assert np.shares_memory(sliced.v, fused)
    assert not sliced.v.flags.c_contiguous
    assert_same_bits(run_fla(sliced, backend), run_fla(case, backend))
    np.testing.assert_array_equal(fused, before)


def reverse_of_reversed(x: Array) -> Array:
    """Negative steps on the first two axes."""
    return x[::-1, ::-1].copy()[::-1, ::-1]


def heads_before_tokens(x: Array) -> Array:
    """The transposed view of a tensor with its first middle axes exchanged."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def read_only(x: Array) -> Array:
    """A copy that refuses to be written."""
    y = x.copy()
    y.flags.writeable = False
    return y


def every_third(x: Array) -> Array:
    """A step on the last axis."""
    return np.repeat(x, 3, axis=-1)[..., ::3]


def odd_address(x: Array) -> Array:
    """An array that begins one byte off."""
    page = np.empty(x.nbytes + 1, np.uint8)
    y = page[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def field_of_records(x: Array) -> Array:
    """A field of packed records, so that strides are no multiples of an element."""
    records = np.zeros(x.shape, [("before", np.uint8), ("x", x.dtype)])
    records["x"] = x
    return records["x"]


VIEWS: list[Callable[[Array], Array]] = [
    np.asfortranarray,
    reverse_of_reversed,
    heads_before_tokens,
    read_only,
    every_third,
    odd_address,
    field_of_records,
]


@both_families
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_t091_any_strides(backend: str, run: Any, view: Callable[[Array], Array], dtype: type) -> None:
    case = make_case(91, t=9, heads=(2, 4), dims=(6, 5), batch=2, dtype=dtype)
    viewed = {name: view(getattr(case, name)) for name in TENSORS}
    for name in TENSORS:
        np.testing.assert_array_equal(viewed[name], getattr(case, name))
    assert_same_bits(run(case.but(**viewed), backend), run(case, backend))


@pytest.mark.parametrize("name", TENSORS)
def test_t091_zero_strides(backend: str, name: str) -> None:
    case = make_case(91, t=9, heads=(2, 4), dims=(6, 5), batch=2)
    tensor = getattr(case, name)
    constant = np.broadcast_to(tensor[:1, :1], tensor.shape)
    assert 0 in constant.strides
    viewed, copied = case.but(**{name: constant}), case.but(**{name: constant.copy()})
    assert_same_bits(run_fla(viewed, backend), run_fla(copied, backend))


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_t091_memory_maps(backend: str, mode: Any, tmp_path: Path) -> None:
    case = make_case(91, t=9, heads=(1, 2))
    mapped = {}
    for name in TENSORS:
        np.save(tmp_path / f"{name}.npy", getattr(case, name))
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode=mode)
        assert isinstance(mapped[name], np.memmap)
    out, state = run_fla(case.but(**mapped), backend)
    assert type(out) is type(state) is np.ndarray
    assert_same_bits(run_fla(case, backend)._replace(out=out, state=state), run_fla(case, backend))


PLAIN_PYTHON = """
import numba, numpy as np, pathlib, sys
from judge import run_cann, run_fla
from reference import make_case
assert numba.config.DISABLE_JIT
run = {"fla": run_fla, "cann": run_cann}[sys.argv[2]]
case = make_case(121, t=70, heads=(1, 2), dims=(5, 7), dtype=np.float16)
np.savez(sys.argv[1], **run(case, sys.argv[3])._asdict())
"""


@both_families
def test_t121_plain_python_gives_the_compiled_bits(backend: str, run: Any, tmp_path: Path) -> None:
    """Pin that the kernels of the suite's run with NUMBA_DISABLE_JIT=1 are the compiled ones to the bit.

    There every unmarked test runs them as plain Python, and an index beyond an array's end raises.
    """
    if backend in ("fast", "recurrent"):
        pytest.skip("fast promises its bits for one instruction set, and plain Python is another")
    paths = [Path(cgdr_numba.__file__).resolve().parents[1], Path(__file__).resolve().parents[1]]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    file = tmp_path / "results.npz"
    family = run.__name__.removeprefix("run_")
    subprocess.run([sys.executable, "-c", PLAIN_PYTHON, str(file), family, backend], env=environment, check=True)
    case = make_case(121, t=70, heads=(1, 2), dims=(5, 7), dtype=np.float16)
    actual = run(case, backend)
    with np.load(file) as plain:
        assert_same_bits(actual._replace(out=plain["out"], state=plain["state"]), actual)
