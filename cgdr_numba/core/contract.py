"""The contract of the chunked operator: every check of it, and the one Problem that all backends take.

Glossary
--------
=====================  ======================  ==========================  =========================================
NPU (CANN)             fla                     here                        meaning
=====================  ======================  ==========================  =========================================
query, key, value      q, k, v                 q, k, v                     [B, T, Hk, Dk], [B, T, Hk, Dk], [B, T, Hv, Dv]
g ("gama")             g                       g                           log decay of a token and value head
beta                   beta                    beta                        how much of the error a token writes
initial_state          initial_state           state                       memory [N, Hv, Dv, Dk]
Nk, Nv; dk, dv         H, HV; K, V             hk, hv; dk, dv              heads and widths
actual_seq_lengths     cu_seqlens              sequences                   which tokens belong together
scale_value            scale                   scale                       factor on q
chunk (64)             chunk_size, BT          CHUNK                       tokens worked on together
vStep                  BV                      v_step                      columns of a V tile
UB, tmpBuff            shared memory           arena, slices               a core's fast memory
workspace              h (chunk states)        workspace                   FP32 state between chunks
block_dim              grid                    bins                        cores that start
=====================  ======================  ==========================  =========================================
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.dtypes import FLOAT32
from cgdr_numba.core.ragged import Sequences, dense, packed


class Names(NamedTuple):
    """How a family of functions calls the arguments that messages name."""

    q: str
    k: str
    v: str
    g: str
    beta: str
    state: str
    lengths: str


FLA = Names("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
CANN = Names("query", "key", "value", "g", "beta", "initial_state", "actual_seq_lengths")


class Tensors(NamedTuple):
    """The tensors of a call as they came; g, beta and state may be None."""

    q: object
    k: object
    v: object
    g: object
    beta: object
    state: object


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """A checked call in canonical form. All arrays are views of what came, or zero-stride constants."""

    op: str
    """Public function that was called."""
    dims: Dims
    sequences: Sequences
    q: NDArray[Any]
    """[B, T, Hk, Dk]"""
    k: NDArray[Any]
    """[B, T, Hk, Dk]"""
    v: NDArray[Any]
    """[B, T, Hv, Dv]"""
    g: NDArray[Any]
    """[B, T, Hv]; zeros where none was given."""
    beta: NDArray[Any]
    """[B, T, Hv]; ones where none was given."""
    state: NDArray[Any]
    """Initial state [N, Hv, Dv, Dk] (V first); zeros where none was given."""
    scale: float
    normalise: bool
    """Whether q and k are l2-normalised first."""
    state_dtype: np.dtype[Any] | None
    """Final state's dtype; None leaves it to the backend (float32, or float64 in golden for float64 inputs)."""
    state_v_first: bool
    """Layout of the state that the caller gave and gets."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self.sequences.length.tolist())


def fla_chunk_problem(
    op: str,
    tensors: Tensors,
    *,
    scale: object,
    normalise: object,
    state_v_first: object,
    cu_seqlens: object,
) -> ChunkProblem:
    """Check a call of the fla family ([B, T, H, D], cu_seqlens, either state layout) and return its problem."""
    checks = Checks(op)
    v_first = checks.flag("state_v_first", state_v_first)
    norm = checks.flag("use_qk_l2norm_in_kernel", normalise)
    arrays = _arrays(checks, FLA, tensors, optional=("g", "beta", "state"))
    q, v = _token_shapes(checks, FLA, arrays, "B, T, ")
    n_rows, n_tokens = q.shape[:2]
    sequences = dense(n_rows, n_tokens)
    if cu_seqlens is not None:
        sequences = _from_cu_seqlens(checks, cu_seqlens, n_rows, n_tokens)
    dims = Dims(n_rows * n_tokens, len(sequences.row), q.shape[2], v.shape[2], q.shape[3], v.shape[3])
    state = arrays["state"]
    if state is not None:
        axes, widths = ("N, Hv, Dv, Dk", (dims.dv, dims.dk)) if v_first else ("N, Hv, Dk, Dv", (dims.dk, dims.dv))
        checks.rank(FLA.state, state, axes)
        checks.shape(FLA.state, state, axes, (dims.n_sequences, dims.hv, *widths))
        arrays["state"] = state if v_first else state.swapaxes(2, 3)
    _dtypes(checks, FLA, arrays)
    return ChunkProblem(
        op=op,
        dims=dims,
        sequences=sequences,
        **_filled(arrays, dims, (n_rows, n_tokens)),
        scale=checks.scale(scale, dims.dk**-0.5),
        normalise=norm,
        state_dtype=None,
        state_v_first=v_first,
    )


def cann_chunk_problem(op: str, tensors: Tensors, *, scale: object, actual_seq_lengths: object) -> ChunkProblem:
    """Check a call of the CANN family ([T, H, D], lengths, V-first state) and return its problem."""
    checks = Checks(op)
    arrays = _arrays(checks, CANN, tensors, optional=("g",))
    q, v = _token_shapes(checks, CANN, arrays, "T, ")
    n_tokens = q.shape[0]
    sequences = _from_lengths(checks, actual_seq_lengths, n_tokens)
    dims = Dims(n_tokens, len(sequences.row), q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    state = arrays["state"]
    assert state is not None
    checks.rank(CANN.state, state, "N, Hv, Dv, Dk")
    checks.shape(CANN.state, state, "N, Hv, Dv, Dk", (dims.n_sequences, dims.hv, dims.dv, dims.dk))
    _dtypes(checks, CANN, arrays)
    for name in ("q", "k", "v", "g", "beta"):
        array = arrays[name]
        arrays[name] = None if array is None else array[np.newaxis]
    return ChunkProblem(
        op=op,
        dims=dims,
        sequences=sequences,
        **_filled(arrays, dims, (1, n_tokens)),
        scale=checks.scale(scale, 1.0),
        normalise=False,
        state_dtype=state.dtype,
        state_v_first=True,
    )


def _arrays(
    checks: Checks, names: Names, tensors: Tensors, optional: tuple[str, ...]
) -> dict[str, NDArray[Any] | None]:
    """Return the tensors by our names after the check of their types; the optional ones may be None."""
    arrays: dict[str, NDArray[Any] | None] = {}
    for ours in Tensors._fields:
        value = getattr(tensors, ours)
        missing = ours in optional and value is None
        arrays[ours] = None if missing else checks.array(getattr(names, ours), value)
    return arrays


def _token_shapes(
    checks: Checks, names: Names, arrays: dict[str, NDArray[Any] | None], lead: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check ranks and shapes of everything that has a token axis; return q and v."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    assert q is not None and k is not None and v is not None
    for name, array, axes in ((names.q, q, "Hk, Dk"), (names.k, k, "Hk, Dk"), (names.v, v, "Hv, Dv")):
        checks.rank(name, array, lead + axes)
    for ours in ("g", "beta"):
        gate = arrays[ours]
        if gate is not None:
            checks.rank(getattr(names, ours), gate, lead + "Hv")
    tokens = q.shape[:-2]
    checks.shape(names.k, k, lead + "Hk, Dk", q.shape)
    checks.shape(names.v, v, lead + "Hv, Dv", (*tokens, *v.shape[-2:]))
    (hk, dk), (hv, dv) = q.shape[-2:], v.shape[-2:]
    if min(hk, dk) < 1:
        raise checks.error(f"`{names.q}` must have Hk and Dk of at least 1, got Hk = {hk}, Dk = {dk}")
    if dv < 1 or hv < 1 or hv % hk:
        raise checks.error(
            f"`{names.v}` must have Dv of at least 1 and Hv a multiple of Hk = {hk} (the heads of `{names.q}`), "
            f"got Hv = {hv}, Dv = {dv}"
        )
    for ours in ("g", "beta"):
        gate = arrays[ours]
        if gate is not None:
            checks.shape(getattr(names, ours), gate, lead + "Hv", (*tokens, hv))
    return q, v


def _dtypes(checks: Checks, names: Names, arrays: dict[str, NDArray[Any] | None]) -> None:
    """Check dtypes: one for q, k and v, and floats everywhere."""
    for ours, array in arrays.items():
        if array is not None:
            checks.floating(getattr(names, ours), array)
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    assert q is not None and k is not None and v is not None
    checks.same_dtype(names.k, k, names.q, q)
    checks.same_dtype(names.v, v, names.q, q)


def _from_cu_seqlens(checks: Checks, value: object, n_rows: int, n_tokens: int) -> Sequences:
    """Check cumulative lengths and return the sequences."""
    name = FLA.lengths
    cu = checks.integers(name, value)
    if n_rows != 1:
        raise checks.error(f"`{FLA.q}` must have B = 1 where `{name}` is given, got B = {n_rows}")
    if len(cu) < 1 or cu[0] != 0 or cu[-1] != n_tokens or np.any(cu[1:] < cu[:-1]):
        raise checks.error(
            f"`{name}` must be [N + 1] sums that begin at 0, never fall and end at T = {n_tokens}, got {_short(cu)}"
        )
    return packed(np.diff(cu))


def _from_lengths(checks: Checks, value: object, n_tokens: int) -> Sequences:
    """Check plain lengths and return the sequences."""
    name = CANN.lengths
    lengths = checks.integers(name, value)
    # Summed as Python integers: 64-bit sums of hostile lengths could wrap round to T.
    if np.any(lengths < 0) or sum(lengths.tolist()) != n_tokens:
        raise checks.error(
            f"`{name}` must be [N] lengths of at least 0 with the sum T = {n_tokens}, got {_short(lengths)} "
            f"with the sum {sum(lengths.tolist())}"
        )
    return packed(lengths)


def _short(values: NDArray[np.int64]) -> str:
    """Return a vector as text, cut in the middle where it is long."""
    listed = values.tolist()
    if len(listed) <= 12:
        return str(listed)
    return "[" + ", ".join([*map(str, listed[:6]), "...", *map(str, listed[-5:])]) + f"] ({len(listed)} values)"


def _filled(
    arrays: dict[str, NDArray[Any] | None], dims: Dims, tokens: tuple[int, int]
) -> dict[str, NDArray[Any]]:
    """Return the arrays with constants of zero stride for what was not given."""
    shapes = {
        "g": (0.0, (*tokens, dims.hv)),
        "beta": (1.0, (*tokens, dims.hv)),
        "state": (0.0, (dims.n_sequences, dims.hv, dims.dv, dims.dk)),
    }
    full: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if array is None:
            constant, shape = shapes[name]
            array = np.broadcast_to(np.array(constant, FLOAT32), shape)
        full[name] = array
    return full
