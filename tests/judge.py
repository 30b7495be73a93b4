"""Cases through the public functions, and results judged by the float64 loop or the kernel's emulation."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, npu_chunk_gated_delta_rule
from emulation import emulate_chunk
from reference import Array, Case, Result, rr_out, rr_state, token_loop


def run_fla(case: Case, backend: str, **options: Any) -> Result:
    """The case through chunk_gated_delta_rule, or through fused_recurrent_gated_delta_rule for "recurrent"."""
    operator = fused_recurrent_gated_delta_rule if backend == "recurrent" else chunk_gated_delta_rule
    out, state = operator(
        case.q,
        case.k,
        case.v,
        g=case.g,
        beta=case.beta,
        backend="fast" if backend == "recurrent" else backend,
        scale=case.scale,
        initial_state=case.state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.l2norm,
        cu_seqlens=case.cu,
        **options,
    )
    assert state is not None
    return Result(out, state)


def run_cann(case: Case, backend: str, **options: Any) -> Result:
    """The case through npu_chunk_gated_delta_rule: batch rows packed, states V first on the way in and out."""
    assert not case.l2norm, "the CANN family does not normalise"
    if backend == "recurrent":
        pytest.skip("the CANN family has no recurrent function yet")
    q, k, v, g, beta = _packed(case)
    out, state = npu_chunk_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=case.initial_state().swapaxes(2, 3),
        actual_seq_lengths=case.lengths,
        scale=case.factor,
        backend=backend,
        **options,
    )
    return Result(out.reshape(case.v.shape), state.swapaxes(2, 3))


both_families = pytest.mark.parametrize("run", [run_fla, run_cann], ids=["fla", "cann"])


def run_kernel(case: Case) -> Result:
    """The case through the emulation of the NPU's kernel, final state in float32."""
    assert not case.l2norm, "normalise before"
    q, k, v, g, beta = _packed(case)
    out, state = emulate_chunk(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=case.initial_state().astype(np.float32).swapaxes(2, 3),
        lengths=case.lengths,
        scale=case.factor,
    )
    return Result(out.reshape(case.v.shape), state.swapaxes(2, 3))


def _packed(case: Case) -> list[Array]:
    """q, k, v, g and beta with batch and token axes made one."""
    return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (case.q, case.k, case.v, case.g, case.beta)]


def same_bits(a: Array, b: Array) -> bool:
    """Whether dtype, shape and every bit agree; any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    words = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    return bool(((words[0] == words[1]) | (np.isnan(a) & np.isnan(b))).all())


def assert_same_bits(actual: Result, expected: Result) -> None:
    """Out and state agree in every bit."""
    assert same_bits(actual.out, expected.out), "out differs"
    assert same_bits(actual.state, expected.state), "state differs"


def assert_within(case: Case, actual: Result, *, out: float, state: float, expected: Result | None = None) -> None:
    """The worst relative rms over (sequence, head) keeps the bounds; `expected` is the token loop's unless given."""
    misses = _misses(case, actual, {"out": out, "state": state}, expected or token_loop(case))
    assert not misses, "; ".join(misses)


def assert_within_or_kernel(
    case: Case, backend: str, actual: Result, *, out: float, state: float, expected: Result | None = None
) -> None:
    """As `assert_within`; where faithful misses a bound, the error must be the kernel's own.

    That is: the emulation misses the same bounds, and faithful has its bits.
    """
    reference = expected or token_loop(case)
    bounds = {"out": out, "state": state}
    misses = _misses(case, actual, bounds, reference)
    if not misses:
        return
    assert backend == "faithful", "; ".join(misses)
    kernel = run_kernel(case)
    assert _misses(case, kernel, bounds, reference) == misses
    assert_same_bits(actual, kernel)


def _misses(case: Case, actual: Result, bounds: dict[str, float], expected: Result) -> list[str]:
    """What exceeds its bound, in words."""
    worst = {"out": rr_out(case, actual.out, expected.out), "state": rr_state(actual.state, expected.state)}
    return [
        f"{name}: relative rms {rr:.3g} > {bounds[name]:g} at sequence {n}, head {h}"
        for name, (rr, n, h) in worst.items()
        if not rr <= bounds[name]
    ]
