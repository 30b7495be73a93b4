"""The definition over a pool of states: token by token in float64, plain NumPy."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dtypes import FLOAT64, round_to
from cgdr_numba.core.exp64 import exp64_of
from cgdr_numba.core.golden import token_loop
from cgdr_numba.core.ragged import value_to_key_head
from cgdr_numba.core.served import note

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
    note(("golden", "tokens"), 1, 1, "plain Python")


def _run_head(problem: "PoolProblem", tokens: slice, read_slot: int, h: int, out: Array) -> None:
    """Run the tokens of one value head.

    S <- e^g S;  S <- S diag(e^gk);  S <- S + (beta (v - S k)) k^T;  o = scale S q;  S goes to the token's slot

    S is [Dk, Dv] here. Sums over Dk add row after row, so the bits depend on nothing but this head's own numbers.
    """
    key_head = value_to_key_head(h, problem.dims)
    arrays = (problem.q[tokens, key_head], problem.k[tokens, key_head], problem.v[tokens, h], problem.beta[tokens, h])
    q, k, v, beta = (x.astype(FLOAT64) for x in arrays)
    # Decays of the head [L, 1, 1], then those of its channels [L, Dk, 1] or again of the head.
    gates = [x[tokens, h] for x in (problem.g, problem.gk) if x is not None]
    decays = [exp64_of(x.reshape(len(q), -1, 1)) for x in gates]
    pool = problem.pool
    state = np.array(pool[read_slot, h].T, FLOAT64, order="C")
    for i, slot in enumerate(problem.write_slot[tokens]):
        one = slice(i, i + 1)
        output = token_loop(q[one], k[one], v[one], [decay[one] for decay in decays], beta[one], state)
        out[tokens.start + i, h] = round_to(output[0] * problem.scale, out.dtype)
        pool[slot, h] = round_to(state, pool.dtype).T
