"""Where the numbers of a call lie in memory must not change a single bit, nor must the call change them."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bits import (
    INPUT_DTYPES,
    LAYOUTS,
    TENSORS,
    Call,
    assert_same,
    every_option,
    faithful,
    faithful_fla,
    make_call,
    poked,
)
from reference import Result

slow = pytest.mark.slow


def assert_layout_does_not_matter(call: Call, layout: Callable[[np.ndarray], np.ndarray]) -> None:
    """The same bits with all tensors laid out anew, in both families, and with each of them alone."""
    expected = faithful(call)
    turned = {name: layout(getattr(call, name)) for name in TENSORS}
    assert_same(faithful(call.but(**turned)), expected)
    if call.initial_state.dtype == np.float32:
        assert_same(faithful_fla(call.but(**turned)), expected)
    for name in TENSORS:
        assert_same(faithful(call.but(**{name: turned[name]})), expected)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(2, 0, 1), pytest.param((70, 3), marks=slow)], ids=str)
def test_strides_and_addresses(lengths: tuple[int, ...], layout: str, dtype: Any) -> None:
    call = make_call(32, lengths, heads=(2, 2), dims=(16, 5), dtype=dtype)
    assert_layout_does_not_matter(call, LAYOUTS[layout])
    mixed = call.but(g=call.g.astype(np.float64), initial_state=call.initial_state.astype(np.float32))
    assert_layout_does_not_matter(mixed, LAYOUTS[layout])


def test_memory_maps(tmp_path: Path) -> None:
    call = make_call(33, (3, 1), dims=(16, 5))
    mapped = {}
    for name in TENSORS:
        path = tmp_path / name
        path.write_bytes(b"odd" + getattr(call, name).tobytes())
        array = getattr(call, name)
        mapped[name] = np.memmap(path, array.dtype, mode="r", offset=3, shape=array.shape)
    assert_same(faithful(call.but(**mapped)), faithful(call))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)], ids=["tokens", "heads", "columns", "all"])
@pytest.mark.parametrize("length", [3, pytest.param(70, marks=slow)])
def test_one_number_for_a_whole_axis(length: int, axes: tuple[int, ...]) -> None:
    call = make_call(34, (length,), heads=(2, 4), dims=(16, 16))
    broadcast = {}
    for name in TENSORS:
        x = getattr(call, name)
        first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))
        broadcast[name] = np.broadcast_to(x[first], x.shape)
    written_out = {name: x.copy() for name, x in broadcast.items()}
    assert_same(faithful(call.but(**broadcast)), faithful(call.but(**written_out)))


def test_one_array_for_several_tensors() -> None:
    call = make_call(35, (5,), heads=(2, 2), dims=(8, 8))
    x = call.query
    states = np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 8)[None, :16].reshape(1, 2, 8, 8)
    shared = call.but(key=x, value=x, g=x[:, :, 0], beta=x[:, :, 1], initial_state=states)
    apart = call.but(**{name: getattr(shared, name).copy() for name in TENSORS})
    assert_same(faithful(shared), faithful(apart))


@every_option
@pytest.mark.parametrize("family", [faithful, faithful_fla])
def test_inputs_stay_as_they_are(family: Callable[..., Result], options: dict[str, str]) -> None:
    call = poked(make_call(36, (4, 0, 2), dims=(16, 20)), np.nan)
    pages = {
        name: np.full([n + 2 for n in getattr(call, name).shape], 7, getattr(call, name).dtype) for name in TENSORS
    }
    for name, page in pages.items():
        page[(slice(1, -1),) * page.ndim] = getattr(call, name)
    inside = {name: page[(slice(1, -1),) * page.ndim] for name, page in pages.items()}
    before = {name: hashlib.sha256(page.tobytes()).hexdigest() for name, page in pages.items()}
    out, state = family(call.but(**inside), **options)
    assert {name: hashlib.sha256(page.tobytes()).hexdigest() for name, page in pages.items()} == before
    assert not any(np.shares_memory(result, page) for result in (out, state) for page in pages.values())
