"""Where the operands of fast's chunked form lie in memory: the same bits from any strides, and nothing written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import COMPILED
from fast_cases import DTYPES, WIDTHS, difference, fast_case, run_fast
from judge import same_bits
from reference import Array, Case, Result

slow = pytest.mark.slow
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
every_layout = pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
every_width = pytest.mark.parametrize(
    "dims", [pytest.param(dims, marks=() if max(dims) < 8 else slow) for dims in WIDTHS], ids=str
)
every_group = pytest.mark.parametrize("group", [1, pytest.param(2, marks=slow), 3])
TENSORS = ("q", "k", "v", "g", "beta", "state")
T = 70 if COMPILED else 7


def same(actual: Result, expected: Result, what: Any = "") -> None:
    found = difference(actual, expected)
    assert not found, f"{what}: {found}"


def base(dims: tuple[int, int], dtype: Any, group: int, v_first: bool, batch: int = 2) -> Case:
    return fast_case(89, T, heads=(2, 2 * group), dims=dims, dtype=dtype, v_first=v_first, batch=batch)


def fused_columns(case: Case) -> list[int]:
    """Where q, k and v end within a fused row."""
    return [int(n) for n in np.cumsum([x.shape[2] * x.shape[3] for x in (case.q, case.k, case.v)])]


def flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)


def split_fused(fused: Array, case: Case) -> dict[str, Array]:
    """q, k and v as views of [B, T, channels]."""
    q_end, k_end, _ = fused_columns(case)
    parts = np.split(fused, [q_end, k_end], axis=2)
    shaped = [x.reshape(like.shape) for x, like in zip(parts, (case.q, case.k, case.v), strict=True)]
    assert all(np.shares_memory(x, fused) for x in shaped)
    return dict(zip(("q", "k", "v"), shaped, strict=True))


@every_layout
@every_dtype
@every_group
@every_width
def test_t089_slices_of_one_buffer(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    case = base(dims, dtype, group, v_first)
    fused = np.concatenate([flat(x) for x in (case.q, case.k, case.v)], axis=2)
    before = fused.copy()
    sliced = case.but(**split_fused(fused, case))
    same(run_fast(sliced, v_first), run_fast(case, v_first))
    assert same_bits(fused, before)


@every_layout
@every_dtype
@every_group
@every_width
def test_channel_major_tensors(dims: tuple[int, int], group: int, dtype: Any, v_first: bool) -> None:
    """What a causal convolution hands over: [B, channels, T], turned, so that tokens are adjacent."""
    case = base(dims, dtype, group, v_first)
    expected = run_fast(case, v_first)
    channels = np.ascontiguousarray(np.concatenate([flat(x) for x in (case.q, case.k, case.v)], axis=2).swapaxes(1, 2))
    turned = case.but(**split_fused(channels.swapaxes(1, 2), case))
    assert turned.q.strides[1] == turned.q.itemsize
    assert turned.q.strides[3] == T * turned.q.itemsize
    same(run_fast(turned, v_first), expected)
    gates = np.ascontiguousarray(np.stack([case.g, case.beta]).swapaxes(2, 3)).swapaxes(2, 3)
    same(run_fast(turned.but(g=gates[0], beta=gates[1]), v_first), expected)
    for name in ("q", "k", "v"):
        same(run_fast(case.but(**{name: getattr(turned, name)}), v_first), expected, name)


def channel_major(x: Array) -> Array:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


def backwards(x: Array) -> Array:
    flip = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[flip])[flip]


def tokens_backwards(x: Array) -> Array:
    return x[:, ::-1].copy()[:, ::-1]


def channel_major_backwards(x: Array) -> Array:
    return channel_major(x[:, ::-1])[:, ::-1]


def spaced(x: Array) -> Array:
    page = np.full([3 * n for n in x.shape], np.nan, x.dtype)
    page[(slice(1, None, 3),) * x.ndim] = x
    return page[(slice(1, None, 3),) * x.ndim]


def among_nan(x: Array) -> Array:
    page = np.full([n + 4 for n in x.shape], np.nan, x.dtype)
    page[(slice(2, -2),) * x.ndim] = x
    return page[(slice(2, -2),) * x.ndim]


def read_only(x: Array) -> Array:
    y = x.copy()
    y.flags.writeable = False
    return y


def off_by(n_bytes: int) -> Callable[[Array], Array]:
    def moved(x: Array) -> Array:
        page = np.zeros(x.nbytes + 64 + n_bytes, np.uint8)
        start = -page.ctypes.data % 64 + n_bytes
        y = page[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        y[...] = x
        assert y.ctypes.data % 64 == n_bytes
        return y

    moved.__name__ = f"off_by_{n_bytes}"
    return moved


def channel_major_off_by_2(x: Array) -> Array:
    return np.moveaxis(off_by(2)(np.ascontiguousarray(np.moveaxis(x, 1, -1))), -1, 1)


def permuted(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(range(x.ndim)[::-1])).transpose(range(x.ndim)[::-1])


VIEWS: list[Callable[[Array], Array]] = [
    channel_major, channel_major_backwards, channel_major_off_by_2, backwards, tokens_backwards, spaced, among_nan,
    read_only, off_by(1), off_by(2), off_by(36), permuted,
]  # fmt: skip
SOME = [(5, 7), pytest.param((37, 53), marks=slow), pytest.param((16, 130), marks=slow), pytest.param((1, 1))]


@every_layout
@every_dtype
@pytest.mark.parametrize("dims", SOME, ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_t091_any_strides(view: Callable[[Array], Array], dims: tuple[int, int], dtype: Any, v_first: bool) -> None:
    case = base(dims, dtype, 2, v_first)
    expected = run_fast(case, v_first)
    views = {name: view(getattr(case, name)) for name in TENSORS}
    before = {name: x.copy() for name, x in views.items()}
    same(run_fast(case.but(**views), v_first), expected, "all of them")
    for name, x in views.items():
        assert same_bits(x, before[name]), f"{name} was written"
        same(run_fast(case.but(**{name: x}), v_first), expected, name)


@every_layout
@every_dtype
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", TENSORS)
def test_t091_zero_strides(name: str, axis: int, dtype: Any, v_first: bool) -> None:
    case = base((5, 7), dtype, 2, v_first)
    tensor = getattr(case, name)
    constant = np.broadcast_to(tensor.take([0], axis % tensor.ndim), tensor.shape)
    assert 0 in constant.strides
    viewed, copied = case.but(**{name: constant}), case.but(**{name: constant.copy()})
    same(run_fast(viewed, v_first), run_fast(copied, v_first))


@every_dtype
def test_one_tensor_for_all(dtype: Any) -> None:
    """q, k and v may be one memory, and a state all of one number."""
    case = fast_case(91, T, heads=(2, 2), dims=(5, 5), dtype=dtype)
    one = case.but(k=case.q, v=case.q, state=np.broadcast_to(np.float32(0.5), case.state.shape))
    apart = one.but(k=case.q.copy(), v=case.q.copy(), state=one.state.copy())
    same(run_fast(one), run_fast(apart))
    assert same_bits(case.q, apart.k)
