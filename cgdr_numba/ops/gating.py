"""The gates by themselves, as serving engines compute them before the operator."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dtypes import FLOAT32
from cgdr_numba.core.gate_options import check_weight
from cgdr_numba.core.gates import RawGates, activate
from cgdr_numba.core.tensors import as_arrays, as_tensors, is_tensor

Array = NDArray[Any]


def fused_gdn_gating(A_log: Array, a: Array, b: Array, dt_bias: Array | None) -> tuple[Array, Array]:
    """Return g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) for the operators and for `RecurrentStep`.

    Args:
        A_log: Logarithm of each head's decay rate [Hv], any float dtype.
        a: Projections that the decay is made from, [T, Hv] or [B, T, Hv], any float dtype and strides.
        b: Logits of the write strength, shape of a.
        dt_bias: Added to a in each head [Hv], any float dtype. None means zeros.

    Returns:
        (g, beta), new float32 arrays [B, T, Hv] (torch tensors where A_log is one); [1, T, Hv] where a is [T, Hv].

    Raises:
        ContractError: Shapes break the contract; a ValueError.
        DtypeError: A type or dtype is not taken; a ContractError and a TypeError.

    Numerics:
        float64 from the exact inputs, rounded once to float32; the same bits on every machine, and those that
        use_gate_in_kernel and use_beta_sigmoid_in_kernel compute. softplus has no threshold above which it would be
        cut to its argument: at torch's threshold, 20, that changes 1e-10 of the value. a = -inf gives g = -0.0 and
        a = inf gives g = -inf; NaN stays NaN.

    Source:
        Names, order and the added batch axis of vLLM's and sglang's function; beta stays float32 here whatever b's
        dtype is.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import fused_gdn_gating
        >>> a, b = np.array([[0.0], [100.0]]), np.array([[0.0], [-np.inf]])
        >>> g, beta = fused_gdn_gating(np.log([2.0]), a, b, np.zeros(1))
        >>> g.shape, g.ravel().tolist(), beta.ravel().tolist()
        ((1, 2, 1), [-1.3862943649291992, -200.0], [0.5, 0.0])
    """
    op = "fused_gdn_gating"
    torch_call = is_tensor(A_log)
    if torch_call:
        A_log, a, b, dt_bias = as_arrays(op, A_log=A_log, a=a, b=b, dt_bias=dt_bias)
    checks = Checks(op)
    projections, logits = checks.array("a", a), checks.array("b", b)
    if projections.ndim not in (2, 3):
        raise checks.error(f"`a` must be [T, Hv] or [B, T, Hv], got {projections.ndim} axes: {list(projections.shape)}")
    checks.shape("b", logits, "T, Hv" if projections.ndim == 2 else "B, T, Hv", projections.shape)
    for name, array in (("a", projections), ("b", logits)):
        checks.floating(name, array)
    hv = projections.shape[-1]
    rates = check_weight(checks, "A_log", A_log, hv)
    bias = None if dt_bias is None else check_weight(checks, "dt_bias", dt_bias, hv)
    if projections.ndim == 2:
        projections, logits = projections[np.newaxis], logits[np.newaxis]
    gates = activate(RawGates(projections, rates, bias, logits, 1.0), FLOAT32)
    return as_tensors(gates["g"], gates["beta"]) if torch_call else (gates["g"], gates["beta"])
