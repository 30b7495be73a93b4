"""The sizes that a plan is asked for, checked: what every planner does first."""

from typing import Final

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import Dims
from cgdr_numba.errors import DtypeError

MAX_LOAD: Final = 2**62
"""What the loads of all items may sum to, so that they count in 64 bits."""


def checked_lengths(op: str, dims: Dims, lengths: object, *, padded: bool = False) -> tuple[int, ...]:
    """Return the tokens of each sequence, after checks of the dims and of the lengths against them.

    Where the call may be padded, tokens may be in no sequence.
    """
    checks = Checks(op)
    if not isinstance(dims, Dims):
        raise DtypeError(f"{op}: `dims` must be Dims, got {type(dims).__qualname__}")
    sizes = tuple(checks.integers("lengths", lengths).tolist())
    total = sum(sizes)
    fits = total <= dims.n_tokens if padded else total == dims.n_tokens
    if len(sizes) != dims.n_sequences or not fits or min(sizes, default=0) < 0:
        rule = f"a sum of at most T = {dims.n_tokens}" if padded else f"the sum T = {dims.n_tokens}"
        raise checks.error(
            f"`lengths` must be [N] = [{dims.n_sequences}] lengths of at least 0 with {rule}, got {list(sizes)} with "
            f"the sum {total}"
        )
    if min(dims.hk, dims.hv, dims.dk, dims.dv) < 1 or dims.hv % dims.hk:
        raise checks.error(
            f"`dims` must have Hk, Hv, Dk, Dv of at least 1 and Hv % Hk == 0, got Hk = {dims.hk}, Hv = {dims.hv}, "
            f"Dk = {dims.dk}, Dv = {dims.dv}"
        )
    return sizes
