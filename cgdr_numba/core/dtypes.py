"""Floating-point elements as raw 16-bit words: exact widening to float32, rounding to nearest even back.

numba's CPU target takes neither float16 nor bfloat16 arrays, and the processor's own conversions differ between
machines (or are missing), so both directions are integer arithmetic. An array of any float dtype and any strides is
seen by kernels as [..., w] little-endian words, w = 1 (float16, bfloat16), 2 (float32) or 4 (float64): one array type
for all of them, without a copy.
"""

import math
import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.jit import kernel

if sys.byteorder != "little":
    raise ImportError("cgdr_numba reads elements as little-endian words; this machine is big-endian")

FP16: Final = 0
BF16: Final = 1
FP32: Final = 2
FP64: Final = 3

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
KINDS: Final = {FLOAT16: FP16, BFLOAT16: BF16, FLOAT32: FP32, FLOAT64: FP64}
"""Element kind by NumPy dtype; the dtypes that the package takes."""

F32_MAX: Final = np.finfo(np.float32).max
HALF_MAX: Final = np.float32(65504.0)
BF16_MAX: Final = np.uint32(0x7F7F0000).view(np.float32)
_HALF_ULP: Final = np.float32(2.0**-24)


_WORDS: Final = {2 * n: np.dtype((np.uint16, (n,))) for n in (1, 2, 4)}
"""By bytes of an element: a dtype whose view adds the axis of its words, whatever the strides."""


def as_words(array: NDArray[Any]) -> NDArray[np.uint16]:
    """Return a view of `array` with one more axis, the 16-bit words of an element."""
    return array.view(_WORDS[array.dtype.itemsize])


def round_to(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return float64 values in `dtype`, rounded once to nearest even.

    ml_dtypes converts float64 to bfloat16 by way of float32, which rounds twice. Here the float32 in between is
    rounded to odd (its last bit set where anything was lost), so that only the second rounding counts.
    """
    if dtype != BFLOAT16:
        return values.astype(dtype)
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    inexact = (back != values) & np.isfinite(back) & (near.view(np.int32) & 1 == 0)
    step = np.where(np.abs(back) < np.abs(values), 1, -1).astype(np.int32)
    odd = np.where(inexact, near.view(np.int32) + step, near.view(np.int32))
    return odd.astype(np.int32).view(np.float32).astype(dtype)


def single(value: float) -> np.float32:
    """Return the float32 nearest to a number; beyond float32 it is infinite, without NumPy's warning."""
    return np.float32(value if abs(value) <= float(F32_MAX) or value != value else math.copysign(math.inf, value))


@kernel
def f32_of(bits: np.uint32) -> np.float32:
    """Return the float32 whose bits these are."""
    # numba widens integer arithmetic to 64 bits, so the cast is needed though the value fits.
    return np.uint32(bits).view(np.float32)


@kernel
def bits_of(value: np.float32) -> np.uint32:
    """Return the bits of a float32."""
    return np.float32(value).view(np.uint32)


@kernel
def half_to_f32(word: np.uint32) -> np.float32:
    """Return the float32 of a float16 word; exact, subnormals included, without a subnormal float32 on the way."""
    sign = (word & np.uint32(0x8000)) << np.uint32(16)
    magnitude = word & np.uint32(0x7FFF)
    if magnitude < np.uint32(0x0400):
        value = np.float32(magnitude) * _HALF_ULP
        return f32_of(bits_of(value) | sign)
    if magnitude >= np.uint32(0x7C00):
        return f32_of(sign | np.uint32(0x7F800000) | (magnitude << np.uint32(13)))
    return f32_of(sign | ((magnitude << np.uint32(13)) + np.uint32(0x38000000)))


@kernel
def f32_to_half(value: np.float32) -> np.uint32:
    """Return the float16 word nearest to `value`, ties to even; overflow gives infinity."""
    bits = bits_of(value)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        return sign | np.uint32(0x7E00)
    if magnitude >= np.uint32(0x477FF000):
        return sign | np.uint32(0x7C00)
    if magnitude >= np.uint32(0x38800000):
        rounded = magnitude - np.uint32(0x38000000) + np.uint32(0x0FFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
        return sign | (rounded >> np.uint32(13))
    if magnitude < np.uint32(0x33000000):
        return sign
    shift = np.uint32(126) - (magnitude >> np.uint32(23))
    mantissa = (magnitude & np.uint32(0x007FFFFF)) | np.uint32(0x00800000)
    half = np.uint32(1) << (shift - np.uint32(1))
    quotient = mantissa >> shift
    rest = mantissa & ((np.uint32(1) << shift) - np.uint32(1))
    if rest > half or (rest == half and (quotient & np.uint32(1)) == np.uint32(1)):
        quotient = quotient + np.uint32(1)
    return sign | quotient


@kernel
def f32_to_bf16(value: np.float32) -> np.uint32:
    """Return the bfloat16 word nearest to `value`, ties to even."""
    bits = bits_of(value)
    if value != value:
        return ((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
    # Shifted first: adding the rounding term to the whole word could pass 2^32.
    lost = bits & np.uint32(0xFFFF)
    kept = bits >> np.uint32(16)
    if lost > np.uint32(0x8000) or (lost == np.uint32(0x8000) and (kept & np.uint32(1)) == np.uint32(1)):
        kept = kept + np.uint32(1)
    return kept


@kernel
def widen(words: NDArray[np.uint16], kind: int) -> np.float32:
    """Return the float32 of one element [w]; exact but for float64, which is rounded to nearest even."""
    low = np.uint32(words[0])
    if kind == FP16:
        return half_to_f32(low)
    if kind == BF16:
        return f32_of(low << np.uint32(16))
    low = low | (np.uint32(words[1]) << np.uint32(16))
    if kind == FP32:
        return f32_of(low)
    high = np.uint64(words[2]) | (np.uint64(words[3]) << np.uint64(16))
    return np.float32(np.uint64(np.uint64(low) | (high << np.uint64(32))).view(np.float64))


@kernel
def narrow(value: np.float32, kind: int, words: NDArray[np.uint16]) -> None:
    """Write `value` as one element [w], rounded to nearest even."""
    if kind == FP16:
        words[0] = np.uint16(f32_to_half(value))
    elif kind == BF16:
        words[0] = np.uint16(f32_to_bf16(value))
    elif kind == FP32:
        bits = bits_of(value)
        words[0] = np.uint16(bits & np.uint32(0xFFFF))
        words[1] = np.uint16(bits >> np.uint32(16))
    else:
        wide = np.float64(value).view(np.uint64)
        for i in range(4):
            words[i] = np.uint16((wide >> np.uint64(16 * i)) & np.uint64(0xFFFF))
