"""Recorded operator calls: read from a file, replayed through the public function, results written back."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

import cgdr_numba
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Problem, Tensors, cann_problem
from cgdr_numba.core.dtypes import KINDS
from cgdr_numba.core.fast.simd import instruction_set
from cgdr_numba.errors import ContractError, DtypeError, UnsupportedError
from cgdr_numba.ops import Backend, npu_chunk_gated_delta_rule
from cgdr_numba.parity.files import Contents, check_name, read, write
from cgdr_numba.parity.metrics import Comparison, compare_out, compare_state
from cgdr_numba.sched.device import DeviceSpec
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import REVISION, Plan, plan_chunk

Array = NDArray[Any]
AnyPlan = Plan | HostPlan

CHUNK_OPERATOR: Final = "npu_chunk_gated_delta_rule"
"""The operator whose calls can be replayed."""
_OPERATORS_TO_COME: Final = ("npu_recurrent_gated_delta_rule",)
_REQUIRED: Final = ("query", "key", "value", "beta", "initial_state", "actual_seq_lengths")
_OPTIONAL: Final = ("g",)
_EXPECTED: Final = {"expected_out": "T, Hv, Dv", "expected_final_state": "N, Hv, Dv, Dk"}
_FORMATS: Final = {"layout": "TND", "state_layout": "N,Hv,Dv,Dk", "seq_lens_format": "lengths"}
"""Metadata that says how the arrays are to be read, and the one value that each may have; absent means this value."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One call of an operator: what went in and, where it was recorded too, what should come out."""

    source: str
    """Where the call came from, as messages begin: a path."""
    operator: str
    """The operator's name."""
    arrays: Mapping[str, Array]
    """Inputs by the operator's argument names; g may be missing."""
    expected: Mapping[str, Array]
    """References by the result's name, `out` and `final_state`, as far as they were recorded."""
    scale: float | None
    """Factor on query; None leaves the operator's default, 1.0."""
    metadata: Mapping[str, str]
    """Everything else that was written beside the arrays."""

    def problem(self) -> Problem:
        """Return the call after every check of the operator's contract; messages begin with the source."""
        names = ("query", "key", "value", "g", "beta", "initial_state")
        tensors = Tensors(*(self.arrays.get(name) for name in names))
        lengths = self.arrays["actual_seq_lengths"]
        return cann_problem(self.source, tensors, scale=self.scale, actual_seq_lengths=lengths)


def load_call(path: str | Path) -> RecordedCall:
    """Read a recorded call and check it.

    Args:
        path: A .safetensors file (metadata as texts) or an .npz file (metadata as texts and numbers without axes).
            Arrays have the operator's argument names; `expected_out` and `expected_final_state` are references. The
            metadata names the operator and may hold scale, layout ("TND"), state_layout ("N,Hv,Dv,Dk"),
            seq_lens_format ("lengths") and anything else.

    Returns:
        The call. Its arrays fit together as the operator's contract asks.

    Raises:
        ContractError: The file cannot be read, or what it holds is no call of the operator.
        UnsupportedError: The operator is known and not offered yet.
    """
    source = Path(path)
    arrays, metadata = read(source)
    operator = metadata.pop("operator", None)
    _check_operator(source, operator)
    for name, only in _FORMATS.items():
        value = metadata.pop(name, only)
        if value.replace(" ", "") != only:
            raise ContractError(f"{source}: metadata `{name}` must be {only!r}, got {value!r}")
    _check_names(source, arrays)
    call = RecordedCall(
        source=str(source),
        operator=CHUNK_OPERATOR,
        arrays={name: arrays[name] for name in (*_REQUIRED, *_OPTIONAL) if name in arrays},
        expected={name.removeprefix("expected_"): arrays[name] for name in _EXPECTED if name in arrays},
        scale=_scale(source, metadata.pop("scale", None)),
        metadata=metadata,
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


def save_results(path: str | Path, call: RecordedCall, out: Array, final_state: Array, plan: AnyPlan | None) -> None:
    """Write a replay's results as .safetensors: `out`, `final_state`, and in the metadata what made them.

    Args:
        path: The file to write; it must not be the call's own.
        call: The call that was replayed.
        out: [T, Hv, Dv].
        final_state: [N, Hv, Dv, Dk].
        plan: The plan that it ran by; None for golden. Of faithful's the kernel's revision, the device and the V tile
            are noted; for fast the instruction set, which its bits depend on.

    Raises:
        ContractError: As in `check_output`.
        OSError: The file cannot be written.
    """
    check_output(path, call)
    metadata = {
        **_formats(call),
        **_made_by(plan),
        "cgdr_numba": cgdr_numba.__version__,
        "call": Path(call.source).name,
    }
    write(Path(path), Contents({"out": out, "final_state": final_state}, metadata))


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
    """Return the recorded call that the package ships.

    It is two packed sequences of a small trained model, of 150 and 70 tokens, the first of them continuing a carried
    state: one key head with its two value heads of 128 by 128, with float64 references.

    Example:
        >>> call = sample_call()
        >>> call.arrays["query"].shape, call.arrays["actual_seq_lengths"].tolist(), sorted(call.expected)
        ((220, 1, 128), [150, 70], ['final_state', 'out'])
    """
    with as_file(files("cgdr_numba") / "data" / "sample_packed.safetensors") as path:
        return replace(load_call(path), source=path.name)


def replay(
    call: RecordedCall,
    backend: str,
    *,
    target: str | DeviceSpec | None = None,
    plan: AnyPlan | None = None,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Run a recorded call through `npu_chunk_gated_delta_rule`.

    golden gets every float input widened to float64, which is exact, so that its results come back unrounded in
    float64. Other backends get the arrays as they were recorded.

    Returns:
        (out [T, Hv, Dv], final state [N, Hv, Dv, Dk]).

    Raises:
        ContractError: The options are not the operator's; see `npu_chunk_gated_delta_rule`.
    """
    arrays: dict[str, Any] = dict(call.arrays)
    if backend == "golden":
        arrays = {name: x.astype(np.float64) if x.dtype in KINDS else x for name, x in arrays.items()}
    return npu_chunk_gated_delta_rule(
        **arrays, scale=call.scale, backend=cast("Backend", backend), target=target, plan=plan, threads=threads
    )


def plan_call(
    call: RecordedCall,
    target: str | DeviceSpec | None = None,
    v_step: int | None = None,
    *,
    backend: str = "faithful",
) -> AnyPlan:
    """Plan a recorded call for a device, as faithful or fast would run it.

    Raises:
        ContractError: The target, the V tile or the backend is not one; BudgetError: nothing fits.
        DtypeError: The call's query, key and value are float64.
    """
    problem = call.problem()
    dtype = problem.q.dtype
    if dtype == np.float64:
        raise DtypeError(f"{call.source}: float64 query, key and value are golden's only, and have no plan")
    return plan_chunk(
        problem.dims,
        problem.lengths,
        backend=cast("Any", backend),
        dtype=dtype.name,
        target=target,
        v_step=v_step,
    )


def compare(call: RecordedCall, out: Array, final_state: Array) -> dict[str, Comparison]:
    """Compare a replay's results with what the call expects, by result name; empty where nothing was recorded."""
    found = {}
    if "out" in call.expected:
        found["out"] = compare_out(out, call.expected["out"], call.arrays["actual_seq_lengths"].tolist())
    if "final_state" in call.expected:
        found["final_state"] = compare_state(final_state, call.expected["final_state"])
    return found


def _formats(call: RecordedCall) -> dict[str, str]:
    """Return the metadata that says what the arrays are; repr keeps every bit of the scale."""
    scale = {} if call.scale is None else {"scale": repr(call.scale)}
    return {"operator": call.operator, **scale, **_FORMATS}


def _made_by(plan: AnyPlan | None) -> dict[str, str]:
    """Return the metadata that says which backend made results, and what their bits depend on."""
    if plan is None:
        return {"backend": "golden"}
    if isinstance(plan, HostPlan):
        return {"backend": "fast", "instruction_set": instruction_set().name}
    return {
        "backend": "faithful",
        "revision": REVISION,
        "device": f"{plan.device.name}: {plan.device.cores} cores, {plan.device.ub_bytes} bytes of UB",
        "v_step": str(plan.tiling.v_step),
    }


def _check_operator(source: Path, operator: str | None) -> None:
    """Refuse calls of other operators."""
    if operator is None:
        raise ContractError(f"{source}: metadata must name the `operator`, {CHUNK_OPERATOR!r}, and has none")
    if operator in _OPERATORS_TO_COME:
        raise UnsupportedError(f"{source}: operator {operator!r} is not offered yet, {CHUNK_OPERATOR!r} is")
    if operator != CHUNK_OPERATOR:
        raise ContractError(f"{source}: metadata `operator` must be {CHUNK_OPERATOR!r}, got {operator!r}")


def _check_names(source: Path, arrays: Mapping[str, Array]) -> None:
    """Refuse missing arrays, and unknown ones: a misspelt `g` would otherwise change the meaning silently."""
    missing = [name for name in _REQUIRED if name not in arrays]
    if missing:
        raise ContractError(
            f"{source}: the file must hold {_listed(_REQUIRED)}, and lacks {_listed(missing)}; "
            f"it holds {_listed(sorted(arrays))}"
        )
    unknown = [name for name in sorted(arrays) if name not in (*_REQUIRED, *_OPTIONAL, *_EXPECTED)]
    if unknown:
        raise ContractError(
            f"{source}: {_listed(unknown)} is no argument of {CHUNK_OPERATOR}; beside the required "
            f"{_listed(_REQUIRED)} a call may hold {_listed((*_OPTIONAL, *_EXPECTED))}"
        )


def _check_expected(call: RecordedCall) -> None:
    """Check the inputs by the contract, and the references' ranks, shapes and dtypes against them."""
    dims = call.problem().dims
    shapes = {"out": (dims.n_tokens, dims.hv, dims.dv), "final_state": (dims.n_sequences, dims.hv, dims.dv, dims.dk)}
    checks = Checks(call.source)
    for result, array in call.expected.items():
        name = f"expected_{result}"
        checks.floating(name, array)
        checks.rank(name, array, _EXPECTED[name])
        checks.shape(name, array, _EXPECTED[name], shapes[result])


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
