"""The contract of the chunked operator: every check of it, and the one Problem that all backends take.

Glossary
--------
=====================  ================  ==============  ==================================================
NPU (CANN)             fla               here            meaning
=====================  ================  ==============  ==================================================
query, key             q, k              q, k            [B, T, Hk, Dk]
value                  v                 v               [B, T, Hv, Dv]
g ("gama")             g                 g               log decay of a token and value head [B, T, Hv]
gk ("gamaK")           gk; g of KDA      gk              the same of every channel of a key [B, T, Hv, Dk]
                       gv                gv              the same of every column of a value [B, T, Hv, Dv]
beta                   beta              beta            how much of the error a token writes [B, T, Hv]
initial_state          initial_state     state           memory S [N, Hv, Dv, Dk]
Nk, Nv; dk, dv         H, HV; K, V       hk, hv; dk, dv  heads and widths
actual_seq_lengths     cu_seqlens        sequences       which tokens belong together
scale_value            scale             scale           factor on q
chunk                  chunk_size, BT    CHUNK           64 tokens worked on together
vStep                  BV                v_step          columns of a V tile
UB, tmpBuff            shared memory     arena, slices   a core's fast memory
workspace              h (chunk states)  workspace       FP32 state between chunks
blockDim               grid              bins            cores that start
=====================  ================  ==============  ==================================================
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.checks import Checks
from cgdr_numba.core.dims import Dims
from cgdr_numba.core.dtypes import FLOAT32
from cgdr_numba.core.gate_options import (
    AS_GIVEN,
    NO_CHANNELS,
    Channels,
    GateOptions,
    check_channels,
    check_gates,
    check_kda_gates,
)
from cgdr_numba.core.gates import RawGates, activate
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


class Arrays(NamedTuple):
    """The tensors after the check of their types."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    g: NDArray[Any] | None
    beta: NDArray[Any] | None
    state: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked call in canonical form.

    All arrays are views of what came, or zero-stride constants; g and beta that had to be computed are new.
    """

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
    raw_gates: RawGates | None = None
    """What g (or gk) and beta were computed from; None where they came as they are."""
    gk: NDArray[Any] | None = None
    """Log decay of every channel [B, T, Hv, Dk] beside g; None where there is none."""
    gv: NDArray[Any] | None = None
    """Log decay of every value column [B, T, Hv, Dv] beside g; None where there is none."""
    gk_name: str = "gk"
    """What the public function calls gk."""

    @property
    def given_state(self) -> NDArray[Any]:
        """The initial state in the caller's layout."""
        return self.state if self.state_v_first else self.state.swapaxes(2, 3)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self.sequences.length.tolist())


def fla_problem(
    op: str,
    tensors: Tensors,
    *,
    scale: object,
    normalise: object,
    state_v_first: object,
    cu_seqlens: object,
    gates: GateOptions = AS_GIVEN,
    channels: Channels = NO_CHANNELS,
) -> Problem:
    """Check a call of the fla family ([B, T, H, D], cu_seqlens, either state layout) and return its problem.

    Gates that are given raw are computed at the end, after all checks.
    """
    checks = Checks(op)
    v_first = checks.flag("state_v_first", state_v_first)
    norm = checks.flag("use_qk_l2norm_in_kernel", normalise)
    arrays = checked_arrays(checks, FLA, tensors, optional=("g", "beta", "state"))
    check_token_shapes(checks, FLA, arrays, "B, T, ")
    n_rows, n_tokens = arrays.q.shape[:2]
    sequences = dense(n_rows, n_tokens)
    if cu_seqlens is not None:
        sequences = _from_cu_seqlens(checks, cu_seqlens, n_rows, n_tokens)
    dims = _dims(arrays, sequences)
    if arrays.state is not None:
        axes, widths = ("N, Hv, Dv, Dk", (dims.dv, dims.dk)) if v_first else ("N, Hv, Dk, Dv", (dims.dk, dims.dv))
        checks.rank(FLA.state, arrays.state, axes)
        checks.shape(FLA.state, arrays.state, axes, (dims.n_sequences, dims.hv, *widths))
        if not v_first:
            arrays = Arrays(*arrays[:5], arrays.state.swapaxes(2, 3))
    check_dtypes(checks, FLA, arrays)
    factor = checks.scale(scale, dims.dk**-0.5)
    tensors_by_name = _filled(arrays, dims)
    if channels is not NO_CHANNELS:
        tensors_by_name["gk"], tensors_by_name["gv"] = check_channels(checks, channels, arrays.q, arrays.v)
    if channels.kda is not None:
        raw_gates = check_kda_gates(checks, gates, channels.kda, tensors_by_name["gk"], arrays.beta)
    else:
        raw_gates = check_gates(checks, gates, arrays.g, arrays.beta, dims.hv)
    if raw_gates is not None:
        computed = activate(raw_gates, arrays.q.dtype)
        if channels.kda is not None and "g" in computed:
            computed["gk"] = computed.pop("g")
        tensors_by_name |= computed
    return Problem(
        op=op,
        dims=dims,
        sequences=sequences,
        **tensors_by_name,
        scale=factor,
        normalise=norm,
        state_dtype=None,
        state_v_first=v_first,
        raw_gates=raw_gates,
        gk_name=channels.gk_name,
    )


def cann_problem(op: str, tensors: Tensors, *, scale: object, actual_seq_lengths: object) -> Problem:
    """Check a call of the CANN family ([T, H, D], lengths, V-first state) and return its problem."""
    checks = Checks(op)
    arrays = checked_arrays(checks, CANN, tensors, optional=("g",))
    check_token_shapes(checks, CANN, arrays, "T, ")
    sequences = _from_lengths(checks, actual_seq_lengths, arrays.q.shape[0])
    q, k, v = (x[np.newaxis] for x in arrays[:3])
    g, beta = (None if x is None else x[np.newaxis] for x in (arrays.g, arrays.beta))
    arrays = Arrays(q, k, v, g, beta, arrays.state)
    dims = _dims(arrays, sequences)
    if arrays.state is not None:
        axes = "N, Hv, Dv, Dk"
        checks.rank(CANN.state, arrays.state, axes)
        checks.shape(CANN.state, arrays.state, axes, (dims.n_sequences, dims.hv, dims.dv, dims.dk))
    check_dtypes(checks, CANN, arrays)
    return Problem(
        op=op,
        dims=dims,
        sequences=sequences,
        **_filled(arrays, dims),
        scale=checks.scale(scale, 1.0),
        normalise=False,
        state_dtype=None if arrays.state is None else arrays.state.dtype,
        state_v_first=True,
    )


def checked_arrays(checks: Checks, names: Names, tensors: Tensors, optional: tuple[str, ...]) -> Arrays:
    """Return the tensors after the check of their types; the optional ones may be None."""
    checked = [
        None if value is None and ours in optional else checks.array(name, value)
        for ours, value, name in zip(tensors._fields, tensors, names, strict=False)
    ]
    return Arrays(*checked)  # type: ignore[arg-type]


def check_token_shapes(checks: Checks, names: Names, arrays: Arrays, lead: str) -> None:
    """Check ranks and shapes of everything that has a token axis."""
    q, k, v = arrays[:3]
    for name, array, axes in ((names.q, q, "Hk, Dk"), (names.k, k, "Hk, Dk"), (names.v, v, "Hv, Dv")):
        checks.rank(name, array, lead + axes)
    gates = [(name, gate) for name, gate in ((names.g, arrays.g), (names.beta, arrays.beta)) if gate is not None]
    for name, gate in gates:
        checks.rank(name, gate, lead + "Hv")
    (*tokens, hk, dk), (hv, dv) = q.shape, v.shape[-2:]
    checks.shape(names.k, k, lead + "Hk, Dk", q.shape)
    checks.shape(names.v, v, lead + "Hv, Dv", (*tokens, hv, dv))
    if min(hk, dk) < 1:
        raise checks.error(f"`{names.q}` must have Hk and Dk of at least 1, got Hk = {hk}, Dk = {dk}")
    if dv < 1 or hv < 1 or hv % hk:
        raise checks.error(
            f"`{names.v}` must have Dv of at least 1 and Hv a multiple of Hk = {hk} (the heads of `{names.q}`), "
            f"got Hv = {hv}, Dv = {dv}"
        )
    for name, gate in gates:
        checks.shape(name, gate, lead + "Hv", (*tokens, hv))


def check_dtypes(checks: Checks, names: Names, arrays: Arrays) -> None:
    """Check dtypes: floats everywhere, and one dtype for q, k and v."""
    for name, array in zip(names, arrays, strict=False):
        if array is not None:
            checks.floating(name, array)
    checks.same_dtype(names.k, arrays.k, names.q, arrays.q)
    checks.same_dtype(names.v, arrays.v, names.q, arrays.q)


def _dims(arrays: Arrays, sequences: Sequences) -> Dims:
    """Return the sizes of arrays that have a batch axis."""
    n_rows, n_tokens, hk, dk = arrays.q.shape
    hv, dv = arrays.v.shape[-2:]
    return Dims(n_rows * n_tokens, len(sequences.row), hk, hv, dk, dv)


def _from_cu_seqlens(checks: Checks, value: object, n_rows: int, n_tokens: int) -> Sequences:
    """Check cumulative lengths and return the sequences."""
    cu = checks.integers(FLA.lengths, value)
    if n_rows != 1:
        raise checks.error(f"`{FLA.q}` must have B = 1 where `{FLA.lengths}` is given, got B = {n_rows}")
    if len(cu) < 1 or cu[0] != 0 or cu[-1] != n_tokens or np.any(cu[1:] < cu[:-1]):
        raise checks.error(
            f"`{FLA.lengths}` must be [N + 1] sums that begin at 0, never fall and end at T = {n_tokens}, "
            f"got {shortened(cu)}"
        )
    return packed(np.diff(cu))


def _from_lengths(checks: Checks, value: object, n_tokens: int) -> Sequences:
    """Check plain lengths and return the sequences."""
    lengths = checks.integers(CANN.lengths, value)
    # Summed as Python integers: 64-bit sums of hostile lengths could wrap round to T.
    total = sum(lengths.tolist())
    if np.any(lengths < 0) or total != n_tokens:
        raise checks.error(
            f"`{CANN.lengths}` must be [N] lengths of at least 0 with the sum T = {n_tokens}, got {shortened(lengths)} "
            f"with the sum {total}"
        )
    return packed(lengths)


def shortened(values: NDArray[np.int64]) -> str:
    """Return a vector as text, cut in the middle where it is long."""
    listed = values.tolist()
    if len(listed) <= 12:
        return str(listed)
    return "[" + ", ".join([*map(str, listed[:6]), "...", *map(str, listed[-5:])]) + f"] ({len(listed)} values)"


def _filled(arrays: Arrays, dims: Dims) -> dict[str, Any]:
    """Return the arrays by name, with constants of zero stride for what was not given."""
    full: dict[str, Any] = dict(zip(Arrays._fields, arrays, strict=True))
    if arrays.g is not None and arrays.beta is not None and arrays.state is not None:
        return full
    gates = (*arrays.q.shape[:2], dims.hv)
    state = (dims.n_sequences, dims.hv, dims.dv, dims.dk)
    constants = {"g": (0.0, gates), "beta": (1.0, gates), "state": (0.0, state)}
    for name, (constant, shape) in constants.items():
        if full[name] is None:
            full[name] = np.broadcast_to(np.array(constant, FLOAT32), shape)
    return full
