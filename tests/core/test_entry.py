"""Entries: arguments in one block, bins one after another or in parallel, and blocks that are kept for later calls."""

import gc
import weakref
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba.core import types

from cgdr_numba.core.entry import ARENAS, INTEGERS, Entry, caller_array, tuple_type

COMPILED = not numba.config.DISABLE_JIT


class Options(NamedTuple):
    """A tuple within the arguments."""

    factor: Any
    is_negative: Any


class Arguments(NamedTuple):
    """What the kernel of these tests takes."""

    x: Any
    options: Any
    nothing: Any
    table: Any
    out: Any


def run_bin(b: int, a: Arguments) -> None:
    """Row b of out = factor times the sum of row b of x, or its negative, in each column of the table's row."""
    total = a.x[b].sum() * a.options.factor
    for i in range(len(a.table)):
        a.out[b, a.table[i]] = -total if a.options.is_negative else total


def kinds_of(dtype: Any) -> Arguments:
    options = tuple_type(Options(types.float32, types.boolean))
    return Arguments(
        caller_array(dtype, 2), options, types.none, INTEGERS, caller_array(types.float32, 2, readonly=False)
    )


entry: Entry[Arguments] = Entry(run_bin, lambda: kinds_of(types.float32), moving=("x", "out"))


def arguments_of(n: int, negative: bool = False) -> Arguments:
    x = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
    out = np.full((n, 4), np.nan, np.float32)
    return Arguments(x, Options(np.float32(2), negative), None, np.array([3, 0]), out)


def expected_of(arguments: Arguments) -> np.ndarray:
    sign = -1 if arguments.options.is_negative else 1
    total = sign * 2 * arguments.x.sum(axis=1, keepdims=True)
    nothing = np.full_like(total, np.nan)
    return np.concatenate([total, nothing, nothing, total], axis=1)


@pytest.mark.parametrize("n_bins", [0, 1, 2, 5])
@pytest.mark.parametrize("negative", [False, True])
def test_every_bin_runs_once_on_the_arguments(n_bins: int, negative: bool) -> None:
    arguments = arguments_of(5, negative)
    entry(n_bins, arguments)
    assert np.array_equal(arguments.out[:n_bins], expected_of(arguments)[:n_bins], equal_nan=True)
    assert np.isnan(arguments.out[n_bins:]).all()


def test_arrays_of_any_strides_are_taken_as_they_are() -> None:
    given = arguments_of(4)
    readonly = np.asfortranarray(given.x)[::-1]
    readonly.flags.writeable = False
    odd = np.frombuffer(bytearray(4 * 16 + 1), np.float32, 16, 1).reshape(4, 4)
    for x, out in ((readonly, given.out[:, ::-1]), (given.x[:, ::2], given.out), (given.x, odd)):
        arguments = given._replace(x=x, out=out)
        out[...] = np.nan
        entry(4, arguments)
        assert np.array_equal(out, expected_of(arguments), equal_nan=True)


@pytest.mark.skipif(not COMPILED, reason="plain Python takes anything")
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        entry(1, arguments_of(1)._replace(x=np.ones((1, 3))))


@pytest.mark.skipif(COMPILED, reason="is about kernels as plain Python")
def test_plain_python_keeps_no_blocks() -> None:
    assert entry.keep(arguments_of(1)) is None


@pytest.mark.skipif(not COMPILED, reason="plain Python keeps no blocks")
@pytest.mark.parametrize("n_bins", [1, 3])
def test_kept_arguments_run_wherever_the_moving_arrays_lie(n_bins: int) -> None:
    first = arguments_of(3)
    kept = entry.keep(first)
    assert kept is not None
    for seed in range(3):
        later = first._replace(
            x=np.random.default_rng(seed).random((3, 3), np.float32), out=np.full_like(first.out, np.nan)
        )
        kept(n_bins, (later.x.ctypes.data, later.out.ctypes.data))
        assert np.array_equal(later.out[:n_bins], expected_of(later)[:n_bins], equal_nan=True)
    assert np.isnan(first.out).all()
    with pytest.raises(TypeError):
        kept(n_bins, (first.x.ctypes.data,))


@pytest.mark.skipif(not COMPILED, reason="plain Python keeps no blocks")
def test_kept_arguments_own_what_stays_and_nothing_that_moves() -> None:
    class Owned(np.ndarray[Any, Any]):
        """Arrays that weak references can be had of."""

    given = arguments_of(2)
    moving, staying = (Owned(x.shape, x.dtype) for x in (given.x, given.table))
    moving[...], staying[...] = given.x, given.table
    watched = [weakref.ref(x) for x in (moving, staying)]
    kept = entry.keep(given._replace(x=moving.view(np.ndarray), table=staying.view(np.ndarray)))
    assert kept is not None
    del moving, staying
    gc.collect()
    assert [x() is None for x in watched] == [True, False]


@pytest.mark.skipif(not COMPILED, reason="nothing is kept on disk")
def test_one_function_for_other_types_is_another_file_on_disk() -> None:
    doubles: Entry[Arguments] = Entry(run_bin, lambda: kinds_of(types.float64))
    files = set()
    for one in (entry, doubles, Entry(run_bin, lambda: kinds_of(types.float32))):
        part = one._parts["run"]
        part.compile()
        (signature,) = part._call.overloads
        files.add(part._call._cache._path(signature))
    assert len(files) == 3, "what moves tells the first from the third"


def test_arenas_are_rows_of_floats() -> None:
    assert (ARENAS.dtype, ARENAS.ndim, ARENAS.layout) == (types.float32, 2, "C")
