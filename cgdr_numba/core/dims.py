"""The sizes of one call: a leaf that the contract and the scheduler share."""

from typing import Literal, NamedTuple

CHUNK = 64
"""Tokens in a chunk. Fixed by the kernel (it is no attribute of the operator)."""
MAX_STEP_TOKENS = 8
"""Tokens of a sequence in one call of the 310P's recurrent kernel, at the most."""
FAST_CHUNK = 16
"""Tokens that the fast backend works on together; divides CHUNK. By measurement: 32 were as fast where value heads
share a key head and slower where they do not, 64 a tenth slower everywhere."""


class Dims(NamedTuple):
    """Sizes of one Gated Delta Rule call; plain integers, so that kernels take it as it is."""

    n_tokens: int
    """T: tokens of all sequences together."""
    n_sequences: int
    """N: sequences, and so states."""
    hk: int
    """Hk: heads of q and k."""
    hv: int
    """Hv: heads of v, g, beta, state and out; a multiple of Hk."""
    dk: int
    """Dk: width of a key."""
    dv: int
    """Dv: width of a value."""


def ceil_div(n: int, step: int) -> int:
    """Return the smallest integer that is at least n / step."""
    return -(-n // step)


def ceil_to(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least n."""
    return ceil_div(n, step) * step


class GateForm(NamedTuple):
    """Which log decays a call over a pool of states has."""

    has_g: bool
    """Whether there is one a token and value head."""
    gk: Literal["none", "scalar", "vector"]
    """Whether there is a second one: none, one a token and value head, or one a token, value head and key column."""
