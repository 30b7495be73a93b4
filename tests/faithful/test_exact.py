"""The faithful backend has the bits of the kernel's emulation: out and final state, any NaN equal to any NaN."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bits import INPUT_DTYPES, Call, assert_emulated, difference, emulated, every_option, make_call, poked
from judge import same_bits
from reference import Result

slow = pytest.mark.slow
BF16 = ml_dtypes.bfloat16
GATE_DTYPES = (np.float16, BF16, np.float32, np.float64)


def small_or_slow(*small: Any, large: tuple[Any, ...]) -> list[Any]:
    """Parameters for every run, and those that plain Python leaves out."""
    return [*small, *(pytest.param(value, marks=slow) for value in large)]


@every_option
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("length", small_or_slow(1, 2, large=(63, 64, 65, 70, 130)))
def test_lengths(length: int, dtype: Any, options: dict[str, str]) -> None:
    assert_emulated(make_call(1, (length,), dims=(16, 32), dtype=dtype), **options)


@pytest.mark.parametrize("length", [15, 16, 17, 33, 63, 64, 65, 70, 130])
def test_lengths_in_few_dimensions(length: int) -> None:
    assert_emulated(make_call(1, (length,), heads=(1, 1), dims=(3, 2)))


@slow
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("dv", [1, 16, 20, 32, 48, 128])
@pytest.mark.parametrize("dk", [1, 16, 63, 64, 65, 80, 127, 128])
def test_widths(dk: int, dv: int, dtype: Any) -> None:
    assert_emulated(make_call(2, (70,), dims=(dk, dv), dtype=dtype))


@slow
@every_option
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("dk", "dv"), [(63, 20), (64, 48), (127, 16), (128, 128), (200, 32)])
def test_widths_with_options(dk: int, dv: int, dtype: Any, options: dict[str, str]) -> None:
    assert_emulated(make_call(2, (70,), heads=(1, 1), dims=(dk, dv), dtype=dtype), **options)


@pytest.mark.parametrize(
    ("dk", "dv"), [(63, 16), (64, 16), (65, 16), (128, 1), (64, 20), (65, 20), (127, 32), (128, 48), (129, 48)]
)
def test_dots_of_whole_and_broken_groups(dk: int, dv: int) -> None:
    """Three rows are enough for sums over Dk to show their order."""
    for seed in range(3):
        assert_emulated(make_call(seed, (3,), heads=(1, 1), dims=(dk, dv)))


@every_option
@pytest.mark.parametrize("dk", [63, 64, 70, 128])
def test_dots_whose_partial_sums_overflow(dk: int, options: dict[str, str]) -> None:
    """Products of +-2.6e38: the vector unit's pair sums saturate, the scalar unit's sums of groups and tail do not."""
    call = make_call(2, (3,), heads=(1, 1), dims=(dk, 2), g=0.0)
    q, k = (np.float32(1.6e19) * np.sign(x) for x in (call.query, call.key))
    assert_emulated(call.but(query=q, key=k, beta=np.ones_like(call.beta), scale=1.0), **options)
    assert_emulated(call.but(query=q, key=np.abs(k), scale=1.0), **options)


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (2, 6), (3, 3)], ids=str)
def test_value_heads_on_key_heads(heads: tuple[int, int]) -> None:
    assert_emulated(make_call(3, (9, 4), heads=heads, dims=(8, 12)))


@every_option
@pytest.mark.parametrize(
    "lengths",
    small_or_slow((3, 0, 5, 1), (0, 0, 7), (0, 0), (), large=((3, 0, 64, 130, 1), (65, 64, 63, 0), (320,))),
    ids=str,
)
def test_sequences(lengths: tuple[int, ...], options: dict[str, str]) -> None:
    assert_emulated(make_call(4, lengths, heads=(2, 4), dims=(16, 8)), **options)


def alternating(low: float, high: float) -> Callable[[int], np.ndarray]:
    """Gates that jump between two numbers."""
    return lambda t: np.where(np.arange(t) % 2, high, low)


def once(value: float, others: float = -0.1) -> Callable[[int], np.ndarray]:
    """One gate that differs from all others, at token 3."""
    return lambda t: np.where(np.arange(t) == 3, value, others)


GATES: dict[str, Callable[[int], np.ndarray]] = {
    "0": lambda t: np.zeros(t),
    "-0": lambda t: np.full(t, -0.0),
    "+0.2": lambda t: np.full(t, 0.2),
    "+3": lambda t: np.full(t, 3.0),
    "-33": lambda t: np.full(t, -33.0),
    "-316": lambda t: np.full(t, -316.0),
    "-inf": lambda t: np.full(t, -np.inf),
    "+inf": lambda t: np.full(t, np.inf),
    "nan": lambda t: np.full(t, np.nan),
    "subnormal": lambda t: np.full(t, -1e-42),
    "about exp's underflow": lambda t: -np.linspace(80.0, 110.0, t),
    "about exp's overflow": lambda t: np.linspace(0.0, 2.8, t),
    "down and up": alternating(-100.0, 100.0),
    "-3e38 twice": alternating(-3e38, -1.0),
    "-33 once": once(-33.0),
    "-inf once": once(-np.inf),
    "+inf once": once(np.inf),
    "nan once": once(np.nan),
}
"""Log decays of one token after another."""


def gated(gates: str, lengths: tuple[int, ...], **shape: Any) -> Call:
    """A call with these gates, turned by a token from head to head."""
    call = make_call(5, lengths, **shape)
    column = GATES[gates](call.dims.n_tokens)
    heads = np.stack([np.roll(column, h) for h in range(call.dims.hv)], axis=1)
    return call.but(g=heads.astype(np.float32))


@every_option
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("lengths", small_or_slow((5,), large=((66,), (70, 130))), ids=str)
def test_gates(lengths: tuple[int, ...], gates: str, options: dict[str, str]) -> None:
    assert_emulated(gated(gates, lengths, dims=(8, 8)), **options)


@every_option
@pytest.mark.parametrize("length", small_or_slow(4, large=(130,)))
def test_no_gates(length: int, options: dict[str, str]) -> None:
    assert_emulated(make_call(6, (length,), dims=(8, 16)).but(g=None), **options)


def largest(array: np.ndarray) -> np.ndarray:
    """Numbers of about an eighth of what the array's dtype can hold."""
    return array * array.dtype.type(float(ml_dtypes.finfo(array.dtype).max) / 8 / float(np.abs(array).max()))


OVERFLOWS: dict[str, Callable[[Call], Call]] = {
    "large values": lambda call: call.but(value=largest(call.value), scale=64.0),
    "large states": lambda call: call.but(initial_state=largest(call.initial_state), scale=64.0),
    "large keys": lambda call: call.but(key=largest(call.key)),
    "growing gates": lambda call: call.but(g=np.full_like(call.g, 30.0 if call.dims.n_tokens < 64 else 3.0)),
    "infinite inputs": lambda call: poked(call, np.inf),
    "-infinite inputs": lambda call: poked(call, -np.inf),
    "nan inputs": lambda call: poked(call, np.nan),
}
"""Data that float32, or the dtype of the result, cannot hold on its way."""


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("axpy", ["two-roundings", "fused"])
@pytest.mark.parametrize("kind", OVERFLOWS)
@pytest.mark.parametrize("lengths", small_or_slow((6,), large=((64,), (70, 130))), ids=str)
def test_overflow_options_on_data_that_overflow(lengths: tuple[int, ...], kind: str, axpy: str, dtype: Any) -> None:
    call = OVERFLOWS[kind](make_call(7, lengths, dtype=dtype, state=dtype))
    ieee = assert_emulated(call, axpy, "ieee")
    saturated = assert_emulated(call, axpy, "saturate")
    assert not all(np.isfinite(x).all() for x in ieee), "these data should overflow"
    assert all(np.isfinite(x).all() for x in saturated)


@pytest.mark.parametrize("length", small_or_slow(6, large=(70,)))
def test_fused_is_another_arithmetic(length: int) -> None:
    """The test of both settings of axpy would prove little where they gave the same bits."""
    call = make_call(8, (length,))
    twice, once_rounded = emulated(call, "two-roundings"), emulated(call, "fused")
    assert not any(same_bits(a, b) for a, b in zip(twice, once_rounded, strict=True))


def cast(call: Call, g: Any, beta: Any, state: Any) -> Call:
    """The call with other dtypes of gates and state, of numbers that the wider ones do not share."""
    wide = make_call(
        9, call.lengths, heads=(call.dims.hk, call.dims.hv), dims=call.dims[-2:], dtype=np.float64, state=np.float64
    )
    return call.but(
        g=np.log(np.random.default_rng(9).random(wide.beta.shape)).astype(g),
        beta=wide.beta.astype(beta),
        initial_state=wide.initial_state.astype(state),
    )


@every_option
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("state", GATE_DTYPES)
def test_dtypes(dtype: Any, state: Any, options: dict[str, str]) -> None:
    call = make_call(9, (4, 0, 3), heads=(1, 1), dims=(4, 5), dtype=dtype)
    for i, g in enumerate(GATE_DTYPES):
        beta = GATE_DTYPES[(i + GATE_DTYPES.index(state)) % 4]
        expected = assert_emulated(cast(call, g, beta, state), **options)
        assert (expected.out.dtype, expected.state.dtype) == (dtype, state)


@slow
@every_option
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("state", GATE_DTYPES)
def test_dtypes_over_several_chunks(dtype: Any, state: Any, options: dict[str, str]) -> None:
    call = make_call(9, (70, 130), dims=(32, 20), dtype=dtype)
    assert_emulated(cast(call, np.float64, state, state), **options)


@every_option
@pytest.mark.parametrize("state", GATE_DTYPES)
def test_casts_at_the_ends_of_every_range(state: Any, options: dict[str, str]) -> None:
    """Numbers about the largest and smallest of each dtype go in and come out; float64's own range ends in float32."""
    powers = np.array(
        [-1074, -160, -149, -148, -133, -126, -25, -24, -15, -14, 15, 16, 126, 127, 128, 1023], np.float64
    )
    numbers = (np.ldexp(np.array([[1.0], [-1.9999], [1.5]]), powers.astype(int))).ravel()  # [48]
    with np.errstate(all="ignore"):
        states = numbers.reshape(1, 1, 3, 16).astype(state)
    call = make_call(10, (2,), heads=(1, 1), dims=(16, 3)).but(initial_state=states)
    zeros = np.zeros_like(call.key)
    for beta in (0.0, 1.0):
        assert_emulated(call.but(key=zeros, beta=np.full_like(call.beta, beta), g=None), **options)
        assert_emulated(call.but(beta=np.full_like(call.beta, beta), scale=1.0), **options)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.0, -2.5, 1 / 3, 1e-42, 1e-60, 3e38, 1e39, -1e300, np.inf, np.nan])
def test_scales(scale: float) -> None:
    for dtype in (np.float16, np.float32):
        assert_emulated(make_call(11, (5,), dtype=dtype, dims=(16, 3)).but(scale=scale))


@slow
@every_option
def test_keys_without_norm_and_betas_outside_of_0_to_1(options: dict[str, str]) -> None:
    """The chunk's inverse grows beyond anything; the order of its sums must hold all the same."""
    call = make_call(12, (70,), dims=(16, 16))
    assert_emulated(call.but(key=5 * call.key, beta=call.beta - np.float16(1.5)), **options)


def test_emulation_is_told_apart_in_one_bit() -> None:
    """What every test above leans on: one wrong bit in out or state is found."""
    call = make_call(13, (3,), dtype=np.float16, state=np.float16)
    out, state = emulated(call)
    for result in (Result(out, state), Result(out.copy(), state.copy())):
        assert not difference(result, emulated(call))
    for name in Result._fields:
        wrong = Result(out.copy(), state.copy())
        getattr(wrong, name).view(np.uint16).flat[7] ^= 1
        assert name in difference(wrong, emulated(call))
