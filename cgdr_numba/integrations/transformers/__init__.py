"""Linear-attention layers of Hugging Face transformers' models on this package's operators, and back.

>>> import pytest; transformers = pytest.importorskip("transformers")
>>> from cgdr_numba.integrations.transformers import disable, enable
>>> sizes = {"hidden_size": 32, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
>>> config = transformers.Qwen3_5TextConfig(num_hidden_layers=2, vocab_size=16, intermediate_size=16, **sizes,
...     layer_types=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=2)
>>> model = transformers.Qwen3_5ForCausalLM(config)
>>> enable(model).layers
('model.layers.0.linear_attn',)
>>> disable(model)
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import transformers
from torch import nn

from cgdr_numba.errors import ContractError, UnsupportedError
from cgdr_numba.integrations.transformers.architectures import Layer, check_version, find_layers
from cgdr_numba.integrations.transformers.guard import Operators, guarded, packing_refused
from cgdr_numba.integrations.transformers.operators import OurOperators
from cgdr_numba.integrations.transformers.routes import Route, can_pack, masks_kept, replaced, route_of

__all__ = ["Report", "disable", "enable", "enabled"]


@dataclass(frozen=True, slots=True)
class Report:
    """What `enable` did, and how many calls went where since."""

    route: Route
    """How functions are replaced: "attributes" (transformers to 5.12), "kernels" (through that library) or "module"."""
    architectures: tuple[str, ...]
    """Folders of the modeling files."""
    layers: tuple[str, ...]
    """The layers that were reached, by name."""
    threads: int | None
    """Threads that operators run on; None: numba's number."""
    transformers: str
    """Its version."""
    calls: Counter[str] = field(default_factory=Counter)
    """Operator calls since, by who ran them: "cgdr_numba", or "original" where gradients were recorded."""

    def __str__(self) -> str:
        """Return the report in a line."""
        kinds = ", ".join(self.architectures)
        return (
            f"cgdr_numba runs {len(self.layers)} layer(s) of {kinds} (transformers {self.transformers}, route "
            f"{self.route}): {', '.join(self.layers)}"
        )


_lock = threading.RLock()
_reports: "weakref.WeakKeyDictionary[nn.Module, tuple[Report, weakref.finalize[..., nn.Module]]]" = (
    weakref.WeakKeyDictionary()
)
"""By enabled model: its report, and what undoes it (at the latest when the model is gone)."""
_taken: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""The layers of enabled models."""


def enable(model: nn.Module, *, threads: int | None = None) -> Report:
    """Let a model's linear-attention layers run `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` here.

    Covered are qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid, and kimi_linear (through KDA), of transformers 5.12 to
    5.24, on the CPU. Beside speed the layers gain packed sequences (``cu_seq_lens_q``, kept apart in the causal
    convolution too), and padding on either side, in first calls and in those that continue from a cache, decays
    and writes nothing. Calls that record gradients go to transformers' own functions: a warning says so where the
    model is in eval mode, and `Report.calls` counts both. Other models are not touched. On layers that hold their
    functions or share them, see `cgdr_numba.integrations.transformers.routes`.

    Args:
        model: The model, or a part of one. Enabling it twice is enabling it once.
        threads: Threads to run on, from 1 to numba's number; None takes numba's setting as it is at a prompt, and one
            thread for decode steps over at most 2 MiB of states. Torch's own number of threads is another setting, and
            neither changes the other.

    Returns:
        The report: route, layers reached, counts of calls. ``print(report)`` is a line.

    Raises:
        UnsupportedError: The model has no layer that is covered, is not on the CPU, or this version of transformers is
            not known.
        ContractError: Some of its layers are enabled through another model, or other threads are asked for than
            before.

    Numerics:
        Float32 inside, whatever the model's dtype. Logits of float32 models agree with transformers' to a relative
        rms of 1e-6 or so; in bfloat16 errors against float32 are those of transformers' own path.
    """
    with _lock:
        if model in _reports:
            report, _ = _reports[model]
            if report.threads != threads:
                raise ContractError(
                    f"enable: `threads` must be as before, {report.threads}, while the model is enabled, got {threads}"
                )
            return report
        layers, route = _layers_and_route(model)
        counts: Counter[str] = Counter()
        operators = {rule: OurOperators(rule, threads, counts) for rule in {layer.rule.operator for layer in layers}}
        kinds = tuple(sorted({layer.architecture for layer in layers}))
        names = tuple(layer.name for layer in layers)
        report = Report(route, kinds, names, threads, transformers.__version__, counts)
        _put(model, layers, route, operators, report)
        return report


def disable(model: nn.Module) -> None:
    """Put back what `enable` replaced, the original functions; a model that is not enabled stays as it is."""
    with _lock:
        if model in _reports:
            _, undo = _reports.pop(model)
            undo()


@contextmanager
def enabled(model: nn.Module, *, threads: int | None = None) -> Iterator[Report]:
    """Enable a model while the block lasts; one that was enabled before stays so behind it."""
    was_enabled = model in _reports
    report = enable(model, threads=threads)
    try:
        yield report
    finally:
        if not was_enabled:
            disable(model)


@contextmanager
def observed(model: nn.Module, make: Callable[[str], Operators]) -> Iterator[Route]:
    """Let a model that is not enabled run its layers' functions through others while the block lasts.

    make returns those for "gdr" and for "kda", and is asked for what the model has.
    """
    layers, route = _layers_and_route(model)
    operators = {rule: make(rule) for rule in {layer.rule.operator for layer in layers}}
    with _lock:
        undo = _replace(model, layers, route, operators)
    try:
        yield route
    finally:
        with _lock:
            undo.close()


def _layers_and_route(model: nn.Module) -> tuple[list[Layer], Route]:
    """Return a model's layers after all checks, and the one way to them."""
    op, version = "enable", transformers.__version__
    check_version(op, version)
    layers = find_layers(op, model)
    for layer in layers:
        if layer.module in _taken:
            raise ContractError(f"enable: `{layer.name}` is enabled already, as a part of another model")
        for name, weight in layer.module.named_parameters():
            if not weight.is_cpu:
                raise UnsupportedError(
                    f"enable: `model` must be in the CPU's memory, got {layer.name}.{name} on {weight.device}"
                )
    routes = {route_of(op, layer, version) for layer in layers}
    if len(routes) > 1:
        raise UnsupportedError(f"enable: the layers of `model` must be reached by one route, got {sorted(routes)}")
    return layers, routes.pop()


def _put(
    model: nn.Module, layers: list[Layer], route: Route, operators: dict[str, OurOperators], report: Report
) -> None:
    """Replace a model's functions until its report is taken back, or the model is gone."""
    undo = _replace(model, layers, route, dict(operators))

    def close() -> None:
        """Undo; the model itself is not held by this."""
        with _lock:
            undo.close()

    finalizer = weakref.finalize(model, close)
    finalizer.atexit = False
    _reports[model] = (report, finalizer)


def _replace(model: nn.Module, layers: list[Layer], route: Route, operators: dict[str, Operators]) -> ExitStack:
    """Replace functions and guard layers; closing the result undoes both."""
    with ExitStack() as stack:
        stack.enter_context(replaced(layers, route))
        stack.enter_context(masks_kept(model))
        if not all(map(can_pack, layers)):
            stack.enter_context(packing_refused(model))
        for layer in layers:
            stack.enter_context(guarded(layer.module, operators[layer.rule.operator]))
            _taken.add(layer.module)
            stack.callback(_taken.discard, layer.module)
        return stack.pop_all()
