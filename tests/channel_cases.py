"""Calls whose channels or columns forget by themselves: inputs, the float64 token loop, runs of the functions.

The loop is written from the recurrence alone; nothing of it comes from the package under test.
"""

from typing import Any

import numpy as np

from cgdr_numba import chunk_kda, fused_recurrent_gated_delta_rule, fused_recurrent_kda
from reference import Array, Case, Result, make_case, normalised

KDA = {"chunk": chunk_kda, "recurrent": fused_recurrent_kda}


def log_decays(seed: int, *shape: int, size: float = 1.0) -> Array:
    """-softplus(N) times `size`, float32."""
    return (-size * np.log1p(np.exp(np.random.default_rng([seed, *shape]).standard_normal(shape)))).astype(np.float32)


def gated_case(seed: int, *, size: float = 1.0, **options: Any) -> tuple[Case, Array, Array]:
    """A case of `make_case`, its gk [B, T, Hv, Dk] and its gv [B, T, Hv, Dv]."""
    case = make_case(seed, **options)
    (*lead, dv), dk = case.v.shape, case.q.shape[3]
    return case, log_decays(seed, *lead, dk, size=size), log_decays(seed + 1, *lead, dv, size=size)


@np.errstate(all="ignore")
def channel_loop(case: Case, gk: Array | None = None, gv: Array | None = None) -> Result:
    """The truth: S <- e^g S; S[d] *= e^gk[d]; S[:, v] *= e^gv[v]; then the delta rule, all in float64."""
    key_head = np.arange(case.v.shape[2]) // (case.v.shape[2] // case.q.shape[2])
    q, k = (normalised(x) if case.l2norm else x.astype(np.float64) for x in (case.q, case.k))
    v, g, beta = (x.astype(np.float64) for x in (case.v, case.g, case.beta))
    out, final = np.zeros(v.shape), case.initial_state().astype(np.float64)
    for n, (row, begin, end) in enumerate(case.sequences()):
        s = final[n]
        for t in range(begin, end):
            s = np.exp(g[row, t])[:, None, None] * s
            if gk is not None:
                s = np.exp(gk[row, t].astype(np.float64))[:, :, None] * s
            if gv is not None:
                s = np.exp(gv[row, t].astype(np.float64))[:, None, :] * s
            error = beta[row, t][:, None] * (v[row, t] - np.einsum("hkv,hk->hv", s, k[row, t, key_head]))
            s = s + k[row, t, key_head][:, :, None] * error[:, None, :]
            out[row, t] = case.factor * np.einsum("hkv,hk->hv", s, q[row, t, key_head])
        final[n] = s
    return Result(out, final)


def _call(function: Any, case: Case, options: dict[str, Any], **gates: Any) -> Result:
    """Call a function of fla's family on a case."""
    given = {
        "beta": case.beta,
        "scale": case.scale,
        "initial_state": case.state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "cu_seqlens": case.cu,
    }
    out, state = function(case.q, case.k, case.v, **{**given, **gates, **options})
    assert state is not None
    return Result(out, state)


def run_gated(case: Case, gk: Array | None, gv: Array | None, backend: str = "fast", **options: Any) -> Result:
    """The case through fused_recurrent_gated_delta_rule; its g may be None."""
    return _call(fused_recurrent_gated_delta_rule, case, options, g=case.g, gk=gk, gv=gv, backend=backend)


def run_kda(form: str, case: Case, g: Array, backend: str = "fast", **options: Any) -> Result:
    """The case, whose own g is left out, through chunk_kda or fused_recurrent_kda."""
    return _call(KDA[form], case, options, g=g, backend=backend)


def without_g(case: Case) -> Case:
    """The case with a g of zeros."""
    return case.but(g=np.zeros_like(case.g))


def v_first(case: Case) -> Case:
    """The case with its states [N, Hv, Dv, Dk]."""
    return case.but(state=np.ascontiguousarray(case.state.swapaxes(2, 3)))


def turned(result: Result) -> Result:
    """The result with the last two axes of its states exchanged."""
    return result._replace(state=result.state.swapaxes(2, 3))
