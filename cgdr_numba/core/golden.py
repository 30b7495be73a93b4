"""The definition: the Gated Delta Rule token by token in float64, plain NumPy."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import round_to
from cgdr_numba.core.exp64 import exp64_of
from cgdr_numba.core.l2norm import l2norm
from cgdr_numba.core.ragged import value_to_key_head

if TYPE_CHECKING:
    from cgdr_numba.core.contract import Problem


def run(problem: "Problem", out: NDArray[Any], final_state: NDArray[Any]) -> None:
    """Compute every (sequence, value head) by itself and round the results once, into out's and final_state's dtypes.

    Writes out [B, T, Hv, Dv] and final_state [N, Hv, Dv, Dk].
    """
    row, start, length = problem.sequences
    for n in range(problem.dims.n_sequences):
        tokens = (row[n], slice(start[n], start[n] + length[n]))
        for h in range(problem.dims.hv):
            key_head = value_to_key_head(h, problem.dims)
            q, k = problem.q[*tokens, key_head], problem.k[*tokens, key_head]
            if problem.normalise:
                q, k = l2norm(q, np.float64), l2norm(k, np.float64)
            v, beta = problem.v[*tokens, h], problem.beta[*tokens, h]
            q, k, v, beta = (x.astype(np.float64) for x in (q, k, v, beta))
            # Decays of the head [L, 1, 1], of its channels [L, Dk, 1] and of its columns [L, 1, Dv].
            gates = [problem.g[*tokens, h, np.newaxis, np.newaxis]]
            if problem.gk is not None:
                gates.append(problem.gk[*tokens, h, :, np.newaxis])
            if problem.gv is not None:
                gates.append(problem.gv[*tokens, h, np.newaxis, :])
            state = np.array(problem.state[n, h].T, np.float64, order="C")
            with np.errstate(all="ignore"):
                outputs = token_loop(q, k, v, [exp64_of(x) for x in gates], beta, state) * problem.scale
                out[*tokens, h] = round_to(outputs, out.dtype)
                final_state[n, h] = round_to(state, final_state.dtype).T


def token_loop(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    decays: list[NDArray[Any]],
    beta: NDArray[Any],
    state: NDArray[Any],
) -> NDArray[Any]:
    """Return S^T q of every token [L, Dv], and move the state S [Dk, Dv] on in place.

    S <- a S, in turn for decays a [L, Dk or 1, Dv or 1];  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    Sums over Dk add row after row, so the bits depend on nothing but this head's own numbers.
    """
    out = np.empty_like(v)
    for t in range(len(v)):
        for decay in decays:
            state *= decay[t]
        memory = np.add.reduce(state * k[t][:, np.newaxis], axis=0)
        state += k[t][:, np.newaxis] * (beta[t] * (v[t] - memory))
        out[t] = np.add.reduce(state * q[t][:, np.newaxis], axis=0)
    return out
