"""The gates that models compute before the operator: log decay and write strength out of raw projections.

    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b), or twice that

and a bounded form of the first, g = lower_bound sigmoid(exp(A_log) (a + dt_bias)).

In float64 out of plain operations, so that every machine, compiled or not, gives the same bits.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import FLOAT32, FLOAT64
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.jit import Compiled, inlined_kernel

_exp64 = inlined_kernel(exp64)


class RawGates(NamedTuple):
    """What the gates of a call are computed from; what is None stays as it is."""

    g: NDArray[Any] | None
    """Projections a [B, T, Hv], or [B, T, Hv, Dk] where every channel has its own."""
    A_log: NDArray[Any] | None
    """Logarithm of each head's rate [Hv]; None means zeros."""
    dt_bias: NDArray[Any] | None
    """Added to the projections [Hv], or [Hv, Dk]; None means zeros."""
    beta: NDArray[Any] | None
    """Logits b [B, T, Hv]."""
    factor: float
    """What the sigmoids of beta are multiplied by."""
    lower_bound: float = 0.0
    """What g is in its bounded form at the lowest, below 0; 0 stands for the form with softplus."""

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are given, by the names of the public arguments."""
        named = {"g": self.g, "A_log": self.A_log, "dt_bias": self.dt_bias, "beta": self.beta}
        return {name: x for name, x in named.items() if x is not None}


@inlined_kernel
def log1p_of_fraction(y: float) -> float:
    """Return log(1 + y) for 0 <= y <= 1: 2 artanh(s) with s = y / (2 + y) <= 1/3, by its series up to s^33.

    Within 2 ulp of the true value, for the smallest y as well; NaN stays NaN.
    """
    s = y / (2.0 + y)
    z = s * s
    p = 1.0 / 33.0
    p = p * z + 1.0 / 31.0
    p = p * z + 1.0 / 29.0
    p = p * z + 1.0 / 27.0
    p = p * z + 1.0 / 25.0
    p = p * z + 1.0 / 23.0
    p = p * z + 1.0 / 21.0
    p = p * z + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    double = s + s
    return double + double * (z * p)


@inlined_kernel
def softplus(x: float) -> float:
    """Return log(1 + e^x) as max(x, 0) + log(1 + e^-|x|), which neither overflows nor cancels; within 3 ulp."""
    # A NaN fails the comparison, and comes back through the second term.
    positive = x if x > 0.0 else 0.0
    return positive + log1p_of_fraction(_exp64(-abs(x)))


@inlined_kernel
def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x), by e^x / (1 + e^x) where x < 0 so that small values keep their digits; within 3 ulp."""
    y = _exp64(-abs(x))
    return (1.0 if x >= 0.0 else y) / (1.0 + y)


def _walk_gates(
    g: NDArray[np.float64],
    rate: NDArray[np.float64],
    dt_bias: NDArray[np.float64],
    beta: NDArray[np.float64],
    factors: tuple[float, float],
    g_single: NDArray[np.float32],
    beta_single: NDArray[np.float32],
) -> None:
    """Replace projections g [B, T, H], A_log in rate [H] and logits beta [B, T, Hv] by gates, -rates and strengths.

    H is Hv, or Hv Dk where every channel has a gate. The same in float32 go to g_single and beta_single. What is not
    wanted has no rows. `factors` are (what sigmoids of beta are multiplied by, lower bound of g or 0).
    """
    factor, lower_bound = factors
    for h in range(rate.shape[0]):
        rate[h] = -_exp64(rate[h])
    for row in range(g.shape[0] if lower_bound < 0.0 else 0):
        for t in range(g.shape[1]):
            for h in range(g.shape[2]):
                gate = lower_bound * sigmoid(-rate[h] * (g[row, t, h] + dt_bias[h]))
                g[row, t, h] = gate
                g_single[row, t, h] = np.float32(gate)
    for row in range(0 if lower_bound < 0.0 else g.shape[0]):
        for t in range(g.shape[1]):
            for h in range(g.shape[2]):
                gate = rate[h] * softplus(g[row, t, h] + dt_bias[h])
                g[row, t, h] = gate
                g_single[row, t, h] = np.float32(gate)
    for row in range(beta.shape[0]):
        for t in range(beta.shape[1]):
            for h in range(beta.shape[2]):
                strength = factor * sigmoid(beta[row, t, h])
                beta[row, t, h] = strength
                beta_single[row, t, h] = np.float32(strength)


def _argument_types() -> tuple[Any, ...]:
    """Return the types of the one signature."""
    doubles, double, singles = (
        types.Array(kind, n_axes, "C") for kind, n_axes in ((types.float64, 3), (types.float64, 1), (types.float32, 3))
    )
    return doubles, double, double, doubles, numba.typeof((1.0, 1.0)), singles, singles


walk_gates = Compiled(_walk_gates, _argument_types)
"""The compiled kernel. It is serial: 65,536 gates of each kind take a quarter of a millisecond."""

_NO_DOUBLES = np.empty((0, 0, 0))
_NO_SINGLES = np.empty((0, 0, 0), np.float32)
_NO_HEADS = np.empty(0)


def activate(raw: RawGates, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
    """Return those of g and beta that are to be computed, in float32, or in float64 where that is `dtype`.

    The inputs are read as they are, whatever their float dtype and strides, and results are rounded once.
    """
    raw_g, a_log, raw_bias, raw_beta, factor, lower_bound = raw
    g = beta = _NO_DOUBLES
    g_single = beta_single = _NO_SINGLES
    rate = dt_bias = _NO_HEADS
    if raw_g is not None:
        rows, hv = raw_g.shape[:2], raw_g.shape[2]
        n_gates = math.prod(raw_g.shape[2:])
        g, g_single = raw_g.astype(FLOAT64, order="C").reshape(*rows, n_gates), memory.result((*rows, n_gates), FLOAT32)
        a_logs = np.zeros(hv) if a_log is None else a_log.astype(FLOAT64)
        rate = np.repeat(a_logs, n_gates // hv)
        dt_bias = np.zeros(n_gates) if raw_bias is None else raw_bias.astype(FLOAT64, order="C").reshape(n_gates)
    if raw_beta is not None:
        beta, beta_single = raw_beta.astype(FLOAT64, order="C"), memory.result(raw_beta.shape, FLOAT32)
    walk_gates(g, rate, dt_bias, beta, (factor, lower_bound), g_single, beta_single)
    computed: dict[str, NDArray[Any]] = {}
    if raw_g is not None:
        computed["g"] = (g if dtype == FLOAT64 else g_single).reshape(raw_g.shape)
    if raw_beta is not None:
        computed["beta"] = beta if dtype == FLOAT64 else beta_single
    return computed
