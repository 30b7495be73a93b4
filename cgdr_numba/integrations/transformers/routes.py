"""How a layer's functions are replaced, for as long as a block lasts, by version of transformers.

=============  ====================  ==================================================================================
attributes     up to 5.12            layers hold their functions: each enabled layer gets others
kernels        with ``kernels``      functions are modules that `kernels.kernelize` gives another forward, through
                                     transformers' and kernels' public way to do so
module         without it            functions are globals of the modeling file, and are replaced there
=============  ====================  ==================================================================================

By the last two a replacement stands for all models of a modeling file; it asks `guard` whose call it has, and calls
the original for every layer that was not enabled.
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn

from cgdr_numba.errors import UnsupportedError
from cgdr_numba.integrations.transformers.architectures import Layer, Rule
from cgdr_numba.integrations.transformers.guard import replacement

Route = Literal["attributes", "kernels", "module"]

_CONVOLUTION = "causal_conv1d_fn"
_NOTHING = object()
_lock = threading.RLock()


def route_of(op: str, layer: Layer, version: str) -> Route:
    """Return the way to a layer's functions.

    Raises:
        UnsupportedError: There is none, so this version of transformers is not known.
    """
    names = {"chunk": "chunk_gated_delta_rule", "recurrent": "recurrent_gated_delta_rule"}
    if all(callable(layer.module.__dict__.get(name)) for name in names.values()):
        return "attributes"
    functions = [getattr(sys.modules[layer.file], name, None) for name in (layer.rule.chunk, layer.rule.recurrent)]
    if all(_takes_the_operators_arguments(function) for function in functions):
        return "kernels" if all(isinstance(function, nn.Module) for function in functions) else "module"
    raise UnsupportedError(
        f"{op}: transformers {version} calls the operator of {type(layer.module).__qualname__} in an unknown way"
    )


def can_pack(layer: Layer) -> bool:
    """Return whether a layer's convolution is among the functions that are replaced."""
    return _CONVOLUTION in layer.module.__dict__ or callable(getattr(sys.modules[layer.file], _CONVOLUTION, None))


@contextmanager
def replaced(layers: list[Layer], route: Route) -> Iterator[None]:
    """Replace the functions of layers by ones that ask the guard, then put the originals back."""
    with ExitStack() as stack:
        if route == "attributes":
            for layer in layers:
                stack.enter_context(_attributes(layer.module))
        else:
            for file in sorted({(layer.file, layer.rule) for layer in layers}):
                stack.enter_context(_shared(*file, route))
        yield


def _takes_the_operators_arguments(function: object) -> bool:
    """Return whether a function of a modeling file takes what the operator's have always taken."""
    call = type(function).forward if isinstance(function, nn.Module) else function
    if not callable(call):
        return False
    return {"query", "key", "value", "g", "beta", "initial_state"} <= inspect.signature(call).parameters.keys()


@contextmanager
def _attributes(layer: nn.Module) -> Iterator[None]:
    """Replace the functions that one layer holds."""
    parts = {"chunk_gated_delta_rule": "chunk", "recurrent_gated_delta_rule": "recurrent"}
    originals = {name: layer.__dict__[name] for name in parts}
    if _CONVOLUTION in layer.__dict__:
        # None there stands for the layer's own convolution, which knows nothing of packed sequences.
        parts[_CONVOLUTION], originals[_CONVOLUTION] = "convolution", layer.__dict__[_CONVOLUTION]
    for name, part in parts.items():
        layer.__dict__[name] = replacement(part, originals[name] or _causal_convolution)
    try:
        yield
    finally:
        layer.__dict__.update(originals)


def _causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, seq_idx: object = None
) -> torch.Tensor:
    """Return the activated causal convolution of x [B, C, T] with weight [C, K], as the layers' own."""
    if seq_idx is not None:
        raise UnsupportedError(
            "enable: packed sequences are kept apart by cu_seq_lens_q; leave out seq_idx, or give both"
        )
    n_channels, width = weight.shape
    summed = nn.functional.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=n_channels)
    activate: Callable[..., Any] = getattr(nn.functional, activation)
    return activate(summed[:, :, : x.shape[-1]])


class _Shared:
    """The replaced functions of one modeling file: put there for the first enabled model, back after the last."""

    def __init__(self, file: str, rule: Rule) -> None:
        self.module = sys.modules[file]
        self.parts = {rule.chunk: "chunk", rule.recurrent: "recurrent"}
        if hasattr(self.module, _CONVOLUTION):
            self.parts[_CONVOLUTION] = "convolution"
        self.n_users = 0
        self.undo = ExitStack()

    def put(self, route: Route) -> None:
        """Replace the functions."""
        with ExitStack() as stack:
            for name, part in self.parts.items():
                function = getattr(self.module, name)
                if route == "kernels":
                    stack.enter_context(_kernelized(function, part))
                else:
                    stack.enter_context(_global(self.module, name, part))
            self.undo = stack.pop_all()


_in_use: dict[tuple[str, Rule], _Shared] = {}


@contextmanager
def _shared(file: str, rule: Rule, route: Route) -> Iterator[None]:
    """Replace the functions of a modeling file while any block lasts."""
    with _lock:
        shared = _in_use.setdefault((file, rule), _Shared(file, rule))
        if shared.n_users == 0:
            shared.put(route)
        shared.n_users += 1
    try:
        yield
    finally:
        with _lock:
            shared.n_users -= 1
            if shared.n_users == 0:
                del _in_use[file, rule]
                shared.undo.close()


@contextmanager
def _global(module: Any, name: str, part: str) -> Iterator[None]:
    """Replace a global of a modeling file."""
    original = getattr(module, name)
    ours = replacement(part, original)
    setattr(module, name, ours)
    try:
        yield
    finally:
        # Somebody else's replacement, put on top of this one, stays; below it this one calls the original.
        if getattr(module, name) is ours:
            setattr(module, name, original)


class _Repository:
    """What `kernels` loads a layer from: here the layer is at hand."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        """Return the layer."""
        return self.layer


@contextmanager
def _kernelized(function: nn.Module, part: str) -> Iterator[None]:
    """Give a function that is a module of `kernels` another forward."""
    from kernels import Mode, kernelize, use_kernel_mapping, use_kernelized_func

    before = function.__dict__.get("forward", _NOTHING)
    dispatch = replacement(part, function.forward)

    def forward(_: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """Ask the guard."""
        return dispatch(*arguments, **keywords)

    name = type(function).kernel_layer_name
    # kernels compares this with the signature of the forward that it replaces.
    forward.__signature__ = inspect.signature(type(function).forward)  # type: ignore[attr-defined]
    kind = type(name, (nn.Module,), {"forward": forward, "has_backward": False})

    @use_kernelized_func(function)
    class Holder(nn.Module):  # type: ignore[misc]
        """A module with the one function, so that kernels touches no other."""

    mapping = {name: {"cpu": {Mode.INFERENCE: _Repository(kind)}}}
    with _quiet("kernels.layer.layer"), use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(Holder(), mode=Mode.INFERENCE, device="cpu")
    ours = function.__dict__["forward"]
    try:
        yield
    finally:
        if function.__dict__.get("forward") is ours:
            del function.__dict__["forward"]
            if before is not _NOTHING:
                function.__dict__["forward"] = before


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a logger's warnings back."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def masks_kept(model: nn.Module) -> Iterator[None]:
    """Let models of version 5.12 hand padding masks to layers in every call; they drop them once a cache is there."""
    name = "_update_linear_attn_mask"
    owners = WeakSet(
        [module for module in model.modules() if hasattr(type(module), name) and name not in module.__dict__]
    )
    del model  # whose end may be what ends this block

    def keep(attention_mask: Any, _: Any) -> Any:
        """Return the mask unless it masks nothing."""
        return None if attention_mask is None or bool(torch.all(attention_mask == 1)) else attention_mask

    for module in owners:
        module.__dict__[name] = keep
    try:
        yield
    finally:
        for module in owners:
            module.__dict__.pop(name, None)
