"""The definition over a pool of states: token by token in float64, plain NumPy."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import FLOAT64, round_to
from cgdr_numba.core.exp64 import exp64
from cgdr_numba.core.ragged import value_to_key_head

if TYPE_CHECKING:
    from cgdr_numba.core.pool_contract import PoolProblem

Array = NDArray[Any]


def run(problem: "PoolProblem", out: Array) -> None:
    """Compute every (sequence, value head) by itself; results and states are rounded once, where they are written.

    Writes out [T, Hv, Dv] but for padding rows, and the pool.
    """
    _, start, length = problem.sequences
    for n in np.flatnonzero(length):
        tokens = slice(start[n], start[n] + length[n])
        for h in range(problem.dims.hv):
            with np.errstate(all="ignore"):
                _run_head(problem, tokens, problem.read_slot[n], h, out)


def _run_head(problem: "PoolProblem", tokens: slice, read_slot: int, h: int, out: Array) -> None:
    """Run the tokens of one value head.

    S <- e^g S;  S <- S diag(e^gk);  S <- S + (beta (v - S k)) k^T;  o = scale S q;  S goes to the token's slot

    S is [Dk, Dv] here. Sums over Dk add row after row, so the bits depend on nothing but this head's own numbers.
    """
    key_head = value_to_key_head(h, problem.dims)
    arrays = (problem.q[tokens, key_head], problem.k[tokens, key_head], problem.v[tokens, h], problem.beta[tokens, h])
    q, k, v, beta = (x.astype(FLOAT64) for x in arrays)
    decays = _decays(problem.g[tokens, h])
    second_decays = None if problem.gk is None else _decays(problem.gk[tokens, h])
    pool = problem.pool
    state = np.array(pool[read_slot, h].T, FLOAT64, order="C")
    for i, slot in enumerate(problem.write_slot[tokens]):
        state *= decays[i]
        if second_decays is not None:
            state *= second_decays[i]
        memory = np.add.reduce(state * k[i][:, np.newaxis], axis=0)
        state += k[i][:, np.newaxis] * (beta[i] * (v[i] - memory))
        output = np.add.reduce(state * q[i][:, np.newaxis], axis=0)
        out[tokens.start + i, h] = round_to(output * problem.scale, out.dtype)
        pool[slot, h] = round_to(state, pool.dtype).T


def _decays(gates: Array) -> NDArray[np.float64]:
    """Return e^gate, [L] for scalars and [L, Dk, 1] for vectors."""
    flat = [exp64(gate) for gate in gates.astype(FLOAT64).ravel()]
    decays = np.array(flat, FLOAT64).reshape(gates.shape)
    return decays if gates.ndim == 1 else decays[..., np.newaxis]
