"""Which tokens come next where a long call runs in parts, so that Python gets to look at signals in between."""

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import CHUNK, Dims, ceil_div


def tokens_of(flops: float, dims: Dims) -> int:
    """Return how many tokens take so many floating point operations, of which the formula has 6 Hv Dk Dv a token."""
    return int(flops / (6 * dims.hv * dims.dk * dims.dv))


def next_lengths(left: NDArray[np.int64], n_tokens: int) -> NDArray[np.int64]:
    """Return the tokens of each sequence [N] in a part of about n_tokens; `left` [N] is what is to be done.

    As many sequences take part as could have 64 tokens each, in order; each gives the same share of what it has left,
    so that bins fill as evenly as those of the whole call. Shares are rounded up to multiples of 64, where sequences
    may be cut without a changed bit.
    """
    chosen = np.flatnonzero(left > 0)[: max(1, n_tokens // CHUNK)]
    share = max(1, ceil_div(int(left[chosen].sum()), max(1, n_tokens)))
    lengths = np.zeros_like(left)
    lengths[chosen] = np.minimum(left[chosen], -(-left[chosen] // (share * CHUNK)) * CHUNK)
    return lengths
