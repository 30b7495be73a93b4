"""A call of fla's family from what came to what goes back: torch tensors, the problem, the final state."""

from typing import Any, NamedTuple

from numpy.typing import NDArray

from cgdr_numba.backends import Options, RecurrentOptions, run, run_recurrent
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Problem, Tensors, fla_problem
from cgdr_numba.core.gate_options import NO_CHANNELS, Channels, GateOptions
from cgdr_numba.core.tensors import as_arrays, as_lengths, as_tensor, as_tensors, is_tensor

Array = NDArray[Any]


class FlaOptions(NamedTuple):
    """What all functions of the family take beside their tensors, as it came."""

    scale: object
    use_qk_l2norm_in_kernel: object
    state_v_first: object
    cu_seqlens: object
    output_final_state: object
    gates: GateOptions
    channels: Channels = NO_CHANNELS


def call_chunked(op: str, tensors: Tensors, options: FlaOptions, how: Options) -> tuple[Any, Any]:
    """Run a function by the backends of the chunked operator; returns out and the final state or None."""
    wants_state = Checks(op).flag("output_final_state", options.output_final_state)
    if is_torch := is_tensor(tensors.q):
        tensors, options, _ = _as_arrays(op, tensors, options, None)
    problem = _problem(op, tensors, options)
    out, seen = run(problem, how)
    state = None
    if wants_state:
        state = seen if problem.state_v_first else seen.swapaxes(2, 3)
    return as_tensors(out, state) if is_torch else (out, state)


def call_recurrent(op: str, tensors: Tensors, options: FlaOptions, how: RecurrentOptions) -> tuple[Any, Any]:
    """Run a function by the backends of the recurrent operator; returns out and out_state, the final state or None."""
    wants_state = Checks(op).flag("output_final_state", options.output_final_state)
    given = how.out_state
    if is_torch := is_tensor(tensors.q):
        tensors, options, out_state = _as_arrays(op, tensors, options, given)
        how = RecurrentOptions(how.backend, how.threads, out_state, tensors.state)
    out, state = run_recurrent(_problem(op, tensors, options), how)
    if not is_torch:
        return out, state if wants_state or given is not None else None
    if given is None:
        return as_tensors(out, state if wants_state else None)
    return as_tensor(out), given


def _problem(op: str, tensors: Tensors, options: FlaOptions) -> Problem:
    """Return the problem that a call's arrays are, after every check of the contract."""
    scale, normalise, state_v_first, cu_seqlens, _, gates, channels = options
    return fla_problem(
        op,
        tensors,
        scale=scale,
        normalise=normalise,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        gates=gates,
        channels=channels,
    )


def _as_arrays(
    op: str, tensors: Tensors, options: FlaOptions, out_state: Any
) -> tuple[Tensors, FlaOptions, Array | None]:
    """Return a call's torch tensors, and the out_state that it may have, as arrays in their places."""
    q, k, v, g, beta, state = tensors
    scale, normalise, state_v_first, cu_seqlens, wants_state, gates, channels = options
    kda = channels.kda
    q, k, v, g, gk, gv, beta, state, a_log, dt_bias, out_state = as_arrays(
        op,
        q=q,
        k=k,
        v=v,
        g=g if kda is None else channels.gk,
        gk=channels.gk if kda is None else None,
        gv=channels.gv,
        beta=beta,
        initial_state=state,
        A_log=gates.A_log,
        dt_bias=gates.dt_bias,
        out_state=out_state,
    )
    if kda is not None:
        g, channels = None, Channels(g, None, kda)
    elif channels is not NO_CHANNELS:
        channels = Channels(gk, gv)
    if a_log is not None or dt_bias is not None:
        gates = gates._replace(A_log=a_log, dt_bias=dt_bias)
    cu_seqlens = as_lengths(op, cu_seqlens)
    options = FlaOptions(scale, normalise, state_v_first, cu_seqlens, wants_state, gates, channels)
    return Tensors(q, k, v, g, beta, state), options, out_state
