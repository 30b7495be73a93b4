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


def check_gates(
    checks: Checks, options: GateOptions, g: NDArray[Any] | None, beta: NDArray[Any] | None, hv: int
) -> RawGates | None:
    """Check the options; g and beta are checked already. Returns what is to be computed, or None for nothing."""
    use_gate, a_log, dt_bias, use_sigmoid, allow_neg = options
    if use_gate is use_sigmoid is allow_neg is False and a_log is dt_bias is None:
        return None
    raw_g = checks.flag("use_gate_in_kernel", use_gate)
    raw_beta = checks.flag("use_beta_sigmoid_in_kernel", use_sigmoid)
    doubled = checks.flag("allow_neg_eigval", allow_neg)
    if doubled and not raw_beta:
        raise checks.error("`allow_neg_eigval` must be False without use_beta_sigmoid_in_kernel=True, got True")
    if raw_beta and beta is None:
        raise checks.error("`beta` must be given with use_beta_sigmoid_in_kernel=True, got None")
    rates, bias = _check_weights(checks, raw_g, a_log, dt_bias, hv)
    if raw_g and g is None:
        raise checks.error("`g` must be given with use_gate_in_kernel=True, got None")
    if not raw_g and not raw_beta:
        return None
    return RawGates(g if raw_g else None, rates, bias, beta if raw_beta else None, 2.0 if doubled else 1.0)


def _check_weights(
    checks: Checks, raw_g: bool, a_log: object, dt_bias: object, hv: int
) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return A_log and dt_bias after their checks; to ignore them without use_gate_in_kernel would hide faults."""
    if raw_g:
        if a_log is None:
            raise checks.error("`A_log` must be given with use_gate_in_kernel=True, got None")
        bias = None if dt_bias is None else check_weight(checks, "dt_bias", dt_bias, hv)
        return check_weight(checks, "A_log", a_log, hv), bias
    for name, value in (("A_log", a_log), ("dt_bias", dt_bias)):
        if value is not None:
            came = f"an array {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__qualname__
            raise checks.error(f"`{name}` must be left out without use_gate_in_kernel=True, got {came}")
    return None, None


def check_weight(checks: Checks, name: str, value: object, hv: int) -> NDArray[Any]:
    """Return A_log or dt_bias after its checks: one float for each value head."""
    weight = checks.array(name, value)
    checks.shape(name, weight, "Hv", (hv,))
    checks.floating(name, weight)
    return weight
