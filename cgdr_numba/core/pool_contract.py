"""The contract of the recurrent operator over a pool of states: every check of it, and the PoolProblem of all backends.

A pool holds one state a slot. A sequence reads its state from one slot and leaves the state after each of its tokens in
that token's slot, so that a serving loop can take any of them back once it knows how many drafted tokens stand.

Glossary, beyond that of `core.contract`
----------------------------------------
===================  ===================================  =========================================================
NPU (CANN)           here                                 meaning
===================  ===================================  =========================================================
state                pool                                 states in their slots [slots, Hv, Dv, Dk], updated in place
ssm_state_indices    write_slot                           slot of the state after each token [T]
num_accepted_tokens  read_slot                            which of a sequence's slots holds its state now
gk ("gamaK")         gk                                   second log decay, by head or by key column
===================  ===================================  =========================================================
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Arrays, Names, Tensors, check_dtypes, check_token_shapes, checked_arrays, shortened
from cgdr_numba.core.dims import Dims, GateForm
from cgdr_numba.core.dtypes import FLOAT32
from cgdr_numba.core.ragged import Sequences
from cgdr_numba.core.slots import SlotIndices, assign_slots

POOL_NAMES = Names("query", "key", "value", "g", "beta", "state", "actual_seq_lengths")
LENGTH_FORMATS = ("lengths", "start+lengths", "cu")
"""How `actual_seq_lengths` may be written: [N] lengths; [1 + N], the first token and lengths; [N + 1] sums from 0."""


class PoolLengths(NamedTuple):
    """Which tokens belong together, as it came."""

    values: object
    form: object


@dataclass(frozen=True, slots=True, eq=False)
class PoolProblem:
    """A checked call over a pool, in canonical form.

    All arrays but the index vectors are views of what came, or zero-stride constants. Only `pool` is written to.

    Every sequence n of length L > 0 begins with S = pool[read_slot[n]] in float32 (float64 in golden); for its tokens t
    in order, S is decayed and updated, out[t] = S (scale q[t]), and S, rounded to the pool's dtype, goes to
    pool[write_slot[t]]. S itself stays unrounded from token to token, and where a sequence names a slot twice the later
    token's state stays. Sequences share no slot that one of them writes, so they may run in any order.
    """

    op: str
    """Public function that was called."""
    dims: Dims
    """n_tokens counts padding rows too; n_sequences counts sequences of length 0."""
    sequences: Sequences
    """Tokens of each sequence; row is 0. Sequences of padding rows have length 0 here: nothing is to be done for them.
    """
    q: NDArray[Any]
    """[T, Hk, Dk]"""
    k: NDArray[Any]
    """[T, Hk, Dk]"""
    v: NDArray[Any]
    """[T, Hv, Dv]"""
    g: NDArray[Any]
    """[T, Hv]; zeros where none was given."""
    gk: NDArray[Any] | None
    """Scalar [T, Hv] or vector [T, Hv, Dk] (`gates.gk` says which); None where there is none to apply."""
    beta: NDArray[Any]
    """[T, Hv]"""
    pool: NDArray[Any]
    """[slots, Hv, Dv, Dk], the caller's array: writable, adjacent elements on the last axis, any larger strides before.
    """
    read_slot: NDArray[np.int64]
    """Slot of the state that each sequence begins with [N]; -1 where its length is 0."""
    write_slot: NDArray[np.int64]
    """Slot of the state after each token [T]; -1 for padding rows, which belong to no sequence of a length above 0."""
    padding: NDArray[np.int64]
    """Tokens that are padding rows, ascending: their rows of out are zero."""
    scale: float
    gates: GateForm
    """Which gates the call has; the 310P's plan depends on it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, 0 for padding."""
        return tuple(self.sequences.length.tolist())


def pool_problem(
    op: str, tensors: Tensors, *, gk: object, scale: object, lengths: PoolLengths, indices: SlotIndices
) -> PoolProblem:
    """Check a call of npu_recurrent_gated_delta_rule and return its problem; the tensors' state is the pool.

    Warns, after all checks, where a scalar gk is dropped because there is a g, as the NPU's host code does.
    """
    checks = Checks(op)
    arrays = checked_arrays(checks, POOL_NAMES, tensors, optional=("g",))
    check_token_shapes(checks, POOL_NAMES, arrays, "T, ")
    (n_tokens, hk, dk), (hv, dv) = arrays.q.shape, arrays.v.shape[1:]
    sequences = _sequences(checks, lengths, n_tokens)
    dims = Dims(n_tokens, len(sequences.row), hk, hv, dk, dv)
    second_gate = None if gk is None else _check_gk(checks, gk, dims)
    check_dtypes(checks, POOL_NAMES, arrays)
    factor = checks.scale(scale, 1.0)
    pool = _check_pool(checks, arrays, second_gate, dims)
    slots = assign_slots(checks, indices, sequences, n_tokens, len(pool))
    has_g = arrays.g is not None
    if has_g and second_gate is not None and second_gate.ndim == 2:
        second_gate = None
        warnings.warn(
            f"{op}: `gk` [T, Hv] is dropped, as the kernel does where `g` is given; add it to `g` to apply both",
            stacklevel=3,
        )
    form = "none" if second_gate is None else "scalar" if second_gate.ndim == 2 else "vector"
    return PoolProblem(
        op=op,
        dims=dims,
        sequences=slots.sequences,
        q=arrays.q,
        k=arrays.k,
        v=arrays.v,
        g=np.broadcast_to(np.zeros((), FLOAT32), (n_tokens, hv)) if arrays.g is None else arrays.g,
        gk=second_gate,
        beta=arrays.beta,  # type: ignore[arg-type]
        pool=pool,
        read_slot=slots.read,
        write_slot=slots.write,
        padding=slots.padding,
        scale=factor,
        gates=GateForm(has_g, form),  # type: ignore[arg-type]
    )


def _sequences(checks: Checks, lengths: PoolLengths, n_tokens: int) -> Sequences:
    """Return where each sequence lies; tokens outside of all of them are padding, which the slots have to say."""
    form = checks.choice("seq_lens_format", lengths.form, LENGTH_FORMATS)
    name = POOL_NAMES.lengths
    values = checks.integers(name, lengths.values)
    if form == "cu":
        if len(values) < 1 or values[0] != 0 or np.any(values[1:] < values[:-1]) or values[-1] > n_tokens:
            raise checks.error(
                f"`{name}` must be [N + 1] sums that begin at 0, never fall and end at T = {n_tokens} at the most, "
                f"got {shortened(values)}"
            )
        return Sequences(np.zeros(len(values) - 1, np.int64), values[:-1].copy(), np.diff(values))
    if form == "start+lengths" and len(values) < 1:
        raise checks.error(f"`{name}` must be [1 + N], the first token and N lengths, got {shortened(values)}")
    # Summed as Python integers: 64-bit sums of hostile lengths could wrap round.
    sizes = values.tolist()
    total = sum(sizes)
    if total > n_tokens or min(sizes, default=0) < 0:
        what = "[N] lengths" if form == "lengths" else "the first token and N lengths, [1 + N] numbers"
        raise checks.error(
            f"`{name}` must be {what} of at least 0 with a sum of at most T = {n_tokens}, got {shortened(values)} with "
            f"the sum {total}"
        )
    first = 0 if form == "lengths" else sizes.pop(0)
    return _placed(first, tuple(sizes))


@functools.lru_cache(maxsize=64)
def _placed(first: int, sizes: tuple[int, ...]) -> Sequences:
    """Return sequences of so many tokens from the first one on; nobody writes into the arrays, so calls share them."""
    lengths = np.array(sizes, np.int64)
    return Sequences(np.zeros(len(sizes), np.int64), first + np.cumsum(lengths) - lengths, lengths)


def _check_gk(checks: Checks, value: object, dims: Dims) -> NDArray[Any]:
    """Return gk after its checks: [T, Hv], or [T, Hv, Dk]; where Dk is 1 the first is taken as the second."""
    gk = checks.array("gk", value)
    if gk.ndim == 2:
        checks.shape("gk", gk, "T, Hv", (dims.n_tokens, dims.hv))
    elif gk.ndim == 3:
        checks.shape("gk", gk, "T, Hv, Dk", (dims.n_tokens, dims.hv, dims.dk))
    else:
        raise checks.error(f"`gk` must be [T, Hv] or [T, Hv, Dk], got {gk.ndim} axes: {list(gk.shape)}")
    checks.floating("gk", gk)
    # The kernel tells the forms apart by the number of elements.
    return gk[..., np.newaxis] if gk.ndim == 2 and dims.dk == 1 else gk


def _check_pool(checks: Checks, arrays: Arrays, gk: NDArray[Any] | None, dims: Dims) -> NDArray[Any]:
    """Return the pool after its checks: shape, writable, elements in places of their own, apart from all inputs."""
    pool = arrays.state
    assert pool is not None, "checked_arrays takes no None for it"
    name, axes = POOL_NAMES.state, "slots, Hv, Dv, Dk"
    checks.rank(name, pool, axes)
    checks.shape(name, pool, axes, (len(pool), dims.hv, dims.dv, dims.dk))
    if not pool.flags.writeable:
        raise checks.error(f"`{name}` must be writable, got a read-only array")
    if not pool.flags.c_contiguous:
        _check_strides(checks, name, pool)
    inputs = {"query": arrays.q, "key": arrays.k, "value": arrays.v, "g": arrays.g, "gk": gk, "beta": arrays.beta}
    for other, array in inputs.items():
        if array is not None and np.may_share_memory(pool, array) and np.shares_memory(pool, array):
            raise checks.error(f"`{name}` must share no memory with inputs, got some of `{other}`")
    return pool


def _check_strides(checks: Checks, name: str, pool: NDArray[Any]) -> None:
    """Refuse a pool whose rows have gaps between elements, or whose elements may lie over one another."""
    if not pool.size:
        return
    steps = sorted((abs(step), n) for step, n in zip(pool.strides, pool.shape, strict=True) if n > 1)
    if pool.shape[3] > 1 and pool.strides[3] != pool.itemsize:
        raise checks.error(
            f"`{name}` must have adjacent elements on its last axis, got a stride of {pool.strides[3]} bytes"
        )
    extent = pool.itemsize
    for step, n in steps:
        if step < extent:
            raise checks.error(f"`{name}` must not overlap itself, got strides {list(pool.strides)}")
        extent = step * (n - 1) + extent
