"""Recorded operator calls: read from a file and checked, written to one, and the results of replays written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import cgdr_numba
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Problem, Tensors, cann_problem
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.core.pool_contract import PoolLengths, PoolProblem, pool_problem
from cgdr_numba.core.slots import SlotIndices
from cgdr_numba.errors import ContractError
from cgdr_numba.parity.files import Contents, check_name, read, write
from cgdr_numba.parity.operators import OPERATORS, RECURRENT_OPERATOR, Operator
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import REVISION, Plan
from cgdr_numba.sched.pool_plan import POOL_REVISION, PoolPlan

Array = NDArray[Any]
AnyPlan = Plan | HostPlan | PoolPlan


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One call of an operator: what went in and, where it was recorded too, what should come out."""

    source: str
    """Where the call came from, as messages begin: a path."""
    operator: str
    """The operator's name."""
    arrays: Mapping[str, Array]
    """Inputs by the operator's argument names; optional ones may be missing."""
    expected: Mapping[str, Array]
    """References by the result's name, `out` and `final_state` (`state` for a pool), as far as they were recorded."""
    scale: float | None
    """Factor on query; None leaves the operator's default, 1.0."""
    metadata: Mapping[str, str]
    """Everything else that was written beside the arrays."""
    seq_lens_format: str = "lengths"
    """How actual_seq_lengths are written."""

    @property
    def kind(self) -> Operator:
        """What is known of the operator."""
        return OPERATORS[self.operator]

    @property
    def has_channels(self) -> bool:
        """Whether there is a gate for every channel of a key, gk [T, Hv, Dk]."""
        return "gk" in self.arrays and self.arrays["gk"].ndim == 3

    def problem(self) -> Problem | PoolProblem:
        """Return the call after every check of the operator's contract; messages begin with the source."""
        given, lengths = self.arrays.get, self.arrays["actual_seq_lengths"]
        is_pool = self.operator == RECURRENT_OPERATOR
        names = ("query", "key", "value", "g", "beta", "state" if is_pool else "initial_state")
        tensors = Tensors(*(given(name) for name in names))
        if not is_pool:
            return cann_problem(self.source, tensors, scale=self.scale, actual_seq_lengths=lengths)
        indices = (given(name) for name in ("ssm_state_indices", "num_accepted_tokens", "read_indices"))
        return pool_problem(
            self.source,
            tensors,
            gk=given("gk"),
            scale=self.scale,
            lengths=PoolLengths(lengths, self.seq_lens_format),
            indices=SlotIndices(*indices),
        )


def load_call(path: str | Path) -> RecordedCall:
    """Read a recorded call and check it.

    Args:
        path: A .safetensors file (metadata as texts) or an .npz file (metadata as texts and numbers without axes).
            Arrays have the operator's argument names; `expected_out` and `expected_final_state` (for a pool
            `expected_state`, all slots after the call) are references. The metadata names the operator and may hold
            scale, layout ("TND"), state_layout ("N,Hv,Dv,Dk", or "slots,Hv,Dv,Dk"), seq_lens_format ("lengths"; for a
            pool also "start+lengths" and "cu") and anything else.

    Returns:
        The call. Its arrays fit together as the operator's contract asks.

    Raises:
        ContractError: The file cannot be read, or what it holds is no call of the operator.
    """
    source = Path(path)
    arrays, metadata = read(source)
    operator = _operator(source, metadata.pop("operator", None))
    found = {}
    for name, allowed in operator.formats.items():
        value = metadata.pop(name, allowed[0])
        found[name] = value.replace(" ", "")
        if found[name] not in allowed:
            raise ContractError(f"{source}: metadata `{name}` must be {_either(allowed)}, got {value!r}")
    _check_names(source, operator, arrays)
    call = RecordedCall(
        source=str(source),
        operator=operator.name,
        arrays={name: arrays[name] for name in (*operator.required, *operator.optional) if name in arrays},
        expected={name.removeprefix("expected_"): arrays[name] for name in operator.expected if name in arrays},
        scale=_scale(source, metadata.pop("scale", None)),
        metadata=metadata,
        seq_lens_format=found["seq_lens_format"],
    )
    _check_expected(call)
    return call


def save_call(path: str | Path, call: RecordedCall) -> None:
    """Write a call as .safetensors, in the form that `load_call` reads.

    Raises:
        ContractError: The name does not end in .safetensors.
        OSError: The file cannot be written.
    """
    expected = {f"expected_{name}": array for name, array in call.expected.items()}
    write(Path(path), Contents({**call.arrays, **expected}, {**call.metadata, **_formats(call)}))


def save_results(path: str | Path, call: RecordedCall, results: tuple[Array, Array], made_by: AnyPlan | str) -> None:
    """Write a replay's results as .safetensors: `out`, `final_state` or `state`, and in the metadata what made them.

    Args:
        path: The file to write; it must not be the call's own.
        call: The call that was replayed.
        results: out [T, Hv, Dv] and the final state [N, Hv, Dv, Dk], or the pool [slots, Hv, Dv, Dk].
        made_by: The plan that it ran by, or the backend's name where it has none. Of faithful's plan the kernel's
            revision, the device and the V tile are noted; for fast the instruction set, which its bits depend on.

    Raises:
        ContractError: As in `check_output`.
        OSError: The file cannot be written.
    """
    check_output(path, call)
    metadata = {
        **_formats(call),
        **_made_by(made_by),
        "cgdr_numba": cgdr_numba.__version__,
        "call": Path(call.source).name,
    }
    out, state = results
    write(Path(path), Contents({"out": out, call.kind.state: state}, metadata))


def check_output(path: str | Path, call: RecordedCall) -> None:
    """Refuse, before anything is run, a file that results of a call could not go into.

    Raises:
        ContractError: The name does not end in .safetensors, its folder does not exist, or it is the call's own file.
    """
    target = Path(path)
    check_name(target)
    if not target.parent.is_dir():
        raise ContractError(f"{target}: the folder to write into must exist, and there is no {target.parent}")
    if target.exists() and Path(call.source).exists() and target.samefile(call.source):
        raise ContractError(f"{target}: results must go into another file than the recorded call that was read")


def sample_call() -> RecordedCall:
    """Return the recorded prefill that the package ships.

    It is two packed sequences of a small trained model, of 150 and 70 tokens, the first of them continuing a carried
    state: one key head with its two value heads of 128 by 128, with float64 references.

    Example:
        >>> call = sample_call()
        >>> call.arrays["query"].shape, call.arrays["actual_seq_lengths"].tolist(), sorted(call.expected)
        ((220, 1, 128), [150, 70], ['final_state', 'out'])
    """
    return _shipped("sample_packed.safetensors")


def sample_decode() -> RecordedCall:
    """Return the recorded decode that the package ships.

    It is two sequences of the same model, of one and of two drafted tokens, over a pool of four slots: one key head
    with one value head of 128 by 128, with float64 references.

    Example:
        >>> call = sample_decode()
        >>> call.arrays["state"].shape, call.arrays["actual_seq_lengths"].tolist(), sorted(call.expected)
        ((4, 1, 128, 128), [1, 2], ['out', 'state'])
    """
    return _shipped("sample_decode.safetensors")


def _shipped(name: str) -> RecordedCall:
    """Return a recorded call of the package's data."""
    with as_file(files("cgdr_numba") / "data" / name) as path:
        return replace(load_call(path), source=path.name)


def _formats(call: RecordedCall) -> dict[str, str]:
    """Return the metadata that says what the arrays are; repr keeps every bit of the scale."""
    scale = {} if call.scale is None else {"scale": repr(call.scale)}
    formats = {name: allowed[0] for name, allowed in call.kind.formats.items()}
    return {"operator": call.operator, **scale, **formats, "seq_lens_format": call.seq_lens_format}


def _made_by(plan: AnyPlan | str) -> dict[str, str]:
    """Return the metadata that says which backend made results, and what their bits depend on."""
    if isinstance(plan, HostPlan) or plan == "fast":
        return {"backend": "fast", "instruction_set": instruction_set().name}
    if isinstance(plan, str):
        return {"backend": plan}
    return {
        "backend": "faithful",
        "revision": POOL_REVISION if isinstance(plan, PoolPlan) else REVISION,
        "device": f"{plan.device.name}: {plan.device.cores} cores, {plan.device.ub_bytes} bytes of UB",
        "v_step": str(plan.tiling.v_step),
    }


def _operator(source: Path, name: str | None) -> Operator:
    """Return the operator of that name."""
    known = _either(tuple(OPERATORS))
    if name is None:
        raise ContractError(f"{source}: metadata must name the `operator`, {known}, and has none")
    if name not in OPERATORS:
        raise ContractError(f"{source}: metadata `operator` must be {known}, got {name!r}")
    return OPERATORS[name]


def _check_names(source: Path, operator: Operator, arrays: Mapping[str, Array]) -> None:
    """Refuse missing arrays, and unknown ones: a misspelt `g` would otherwise change the meaning silently."""
    required, more = operator.required, (*operator.optional, *operator.expected)
    missing = [name for name in required if name not in arrays]
    if missing:
        raise ContractError(
            f"{source}: the file must hold {_listed(required)}, and lacks {_listed(missing)}; "
            f"it holds {_listed(sorted(arrays))}"
        )
    unknown = [name for name in sorted(arrays) if name not in (*required, *more)]
    if unknown:
        raise ContractError(
            f"{source}: {_listed(unknown)} is no argument of {operator.name}; beside the required "
            f"{_listed(required)} a call may hold {_listed(more)}"
        )


def _check_expected(call: RecordedCall) -> None:
    """Check the inputs by the contract, and the references' ranks, shapes and dtypes against them."""
    problem = call.problem()
    dims = problem.dims
    n_states = len(problem.pool) if isinstance(problem, PoolProblem) else dims.n_sequences
    shapes = {
        "expected_out": (dims.n_tokens, dims.hv, dims.dv),
        f"expected_{call.kind.state}": (n_states, dims.hv, dims.dv, dims.dk),
    }
    checks = Checks(call.source)
    for name, axes in call.kind.expected.items():
        array = call.expected.get(name.removeprefix("expected_"))
        if array is not None:
            checks.floating(name, array)
            checks.rank(name, array, axes)
            checks.shape(name, array, axes, shapes[name])


def _scale(source: Path, text: str | None) -> float | None:
    """Return the scale as a number."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ContractError(f"{source}: metadata `scale` must be a number, got {text!r}") from None


def _listed(names: "tuple[str, ...] | list[str]") -> str:
    """Return names as text."""
    return ", ".join(f"`{name}`" for name in names) if names else "nothing"


def _either(values: tuple[str, ...]) -> str:
    """Return the values that something may have as text."""
    return " or ".join(repr(value) for value in values)
