"""The gate options of fla's functions: their checks, before anything is computed from them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.gates import RawGates


class GateOptions(NamedTuple):
    """The options as they came."""

    use_gate_in_kernel: object = False
    A_log: object = None
    dt_bias: object = None
    use_beta_sigmoid_in_kernel: object = False
    allow_neg_eigval: object = False


AS_GIVEN = GateOptions()
"""g is the log decay and beta the write strength."""


class KdaOptions(NamedTuple):
    """Further options of functions whose g has a log decay for every channel, as they came."""

    safe_gate: object
    lower_bound: object


class Channels(NamedTuple):
    """Log decays of a key head's channels and of value columns, as they came."""

    gk: object = None
    gv: object = None
    kda: KdaOptions | None = None
    """Options of a function that calls gk g, and whose raw gates are gk's."""

    @property
    def gk_name(self) -> str:
        """What messages call gk."""
        return "gk" if self.kda is None else "g"


NO_CHANNELS = Channels()
"""Every head forgets as a whole."""
LOWEST_BOUND = -5.0
"""Smallest lower bound of a gate that fla takes."""


def check_gates(
    checks: Checks, options: GateOptions, g: NDArray[Any] | None, beta: NDArray[Any] | None, hv: int
) -> RawGates | None:
    """Check the options; g and beta are checked already. Returns what is to be computed, or None for nothing."""
    use_gate, a_log, dt_bias, use_sigmoid, allow_neg = options
    if use_gate is use_sigmoid is allow_neg is False and a_log is dt_bias is None:
        return None
    raw_g = checks.flag("use_gate_in_kernel", use_gate)
    logits, factor = _check_logits(checks, use_sigmoid, allow_neg, beta)
    rates, bias = _check_weights(checks, raw_g, a_log, dt_bias, hv)
    if raw_g and g is None:
        raise checks.error("`g` must be given with use_gate_in_kernel=True, got None")
    if not raw_g and logits is None:
        return None
    return RawGates(g if raw_g else None, rates, bias, logits, factor)


def check_kda_gates(
    checks: Checks, options: GateOptions, kda: KdaOptions, g: NDArray[Any], beta: NDArray[Any] | None
) -> RawGates | None:
    """Check the options of a g [B, T, Hv, Dk], which is checked already. Returns what is to be computed, or None."""
    raw_g = checks.flag("use_gate_in_kernel", options.use_gate_in_kernel)
    is_safe = checks.flag("safe_gate", kda.safe_gate)
    logits, factor = _check_logits(checks, options.use_beta_sigmoid_in_kernel, options.allow_neg_eigval, beta)
    if not raw_g:
        _refuse_weights(checks, {"A_log": options.A_log, "dt_bias": options.dt_bias, "lower_bound": kda.lower_bound})
        return None if logits is None else RawGates(None, None, None, logits, factor)
    hv, dk = g.shape[2:]
    rates = None if options.A_log is None else check_weight(checks, "A_log", options.A_log, hv)
    bias = None if options.dt_bias is None else _check_channel_bias(checks, options.dt_bias, hv, dk)
    if is_safe and kda.lower_bound is None:
        raise checks.error("`lower_bound` must be given with safe_gate=True and use_gate_in_kernel=True, got None")
    bound = checks.scale(kda.lower_bound, 0.0, "lower_bound")
    if kda.lower_bound is not None and not LOWEST_BOUND <= bound < 0:
        raise checks.error(f"`lower_bound` must be from {LOWEST_BOUND:g} to below 0, got {bound}")
    return RawGates(g, rates, bias, logits, factor, bound)


def check_channels(
    checks: Checks, channels: Channels, q: NDArray[Any], v: NDArray[Any]
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return gk [B, T, Hv, Dk] and gv [B, T, Hv, Dv] after their checks; q and v are checked already."""
    checked: list[NDArray[Any] | None] = []
    for name, value, axis, width in (
        (channels.gk_name, channels.gk, "Dk", q.shape[3]),
        ("gv", channels.gv, "Dv", v.shape[3]),
    ):
        if value is None and (axis == "Dv" or channels.kda is None):
            checked.append(None)
            continue
        array = checks.array(name, value)
        checks.rank(name, array, f"B, T, Hv, {axis}")
        checks.shape(name, array, f"B, T, Hv, {axis}", (*v.shape[:3], width))
        checks.floating(name, array)
        checked.append(array)
    gk, gv = checked
    return gk, gv


def _check_logits(
    checks: Checks, use_sigmoid: object, allow_neg: object, beta: NDArray[Any] | None
) -> tuple[NDArray[Any] | None, float]:
    """Return beta where it holds logits, and the factor on their sigmoids."""
    raw_beta = checks.flag("use_beta_sigmoid_in_kernel", use_sigmoid)
    doubled = checks.flag("allow_neg_eigval", allow_neg)
    if doubled and not raw_beta:
        raise checks.error("`allow_neg_eigval` must be False without use_beta_sigmoid_in_kernel=True, got True")
    if raw_beta and beta is None:
        raise checks.error("`beta` must be given with use_beta_sigmoid_in_kernel=True, got None")
    return beta if raw_beta else None, 2.0 if doubled else 1.0


def _check_weights(
    checks: Checks, raw_g: bool, a_log: object, dt_bias: object, hv: int
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return A_log and dt_bias after their checks; to ignore them without use_gate_in_kernel would hide faults."""
    if raw_g:
        if a_log is None:
            raise checks.error("`A_log` must be given with use_gate_in_kernel=True, got None")
        bias = None if dt_bias is None else check_weight(checks, "dt_bias", dt_bias, hv)
        return check_weight(checks, "A_log", a_log, hv), bias
    _refuse_weights(checks, {"A_log": a_log, "dt_bias": dt_bias})
    return None, None


def _refuse_weights(checks: Checks, weights: dict[str, object]) -> None:
    """Raise for what only raw gates have."""
    for name, value in weights.items():
        if value is not None:
            came = f"an array {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__qualname__
            raise checks.error(f"`{name}` must be left out without use_gate_in_kernel=True, got {came}")


def _check_channel_bias(checks: Checks, value: object, hv: int, dk: int) -> NDArray[Any]:
    """Return dt_bias as [Hv, Dk] after its checks: one float for each channel, flat or not."""
    bias = checks.array("dt_bias", value)
    if bias.shape not in ((hv * dk,), (hv, dk)):
        raise checks.error(
            f"`dt_bias` must be [Hv * Dk] = [{hv * dk}] or [Hv, Dk] = [{hv}, {dk}], got {list(bias.shape)}"
        )
    checks.floating("dt_bias", bias)
    return bias.reshape(hv, dk)


def check_weight(checks: Checks, name: str, value: object, hv: int) -> NDArray[Any]:
    """Return A_log or dt_bias after its checks: one float for each value head."""
    weight = checks.array(name, value)
    checks.shape(name, weight, "Hv", (hv,))
    checks.floating(name, weight)
    return weight
