"""Which enabled layer is running in this thread: functions that models share ask here whose call they have."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cgdr_numba.errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_not_traced: Callable[[F], F] = torch.compiler.disable
"""Keeps `torch.compile` out: it would trace the operators' own Python, and through the guard in circles."""


class Run(NamedTuple):
    """One forward pass of an enabled layer."""

    layer: nn.Module
    operators: "Operators"
    """What the layer's functions are replaced by."""
    padding: Tensor | None
    """[B, T], true where a token is padding; None where none is."""
    cu_seqlens: Tensor | None
    """Sums of the lengths of packed sequences."""


class Call(NamedTuple):
    """A call of one of the layer's functions."""

    part: str
    """"chunk", "recurrent" or "convolution"."""
    original: Callable[..., Any]
    """The function that was replaced."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def run_original(self) -> Any:
        """Call the function that was replaced."""
        return self.original(*self.arguments, **self.keywords)


class Operators(Protocol):
    """What runs instead of a layer's functions."""

    def __call__(self, call: Call, run: Run) -> Any:
        """Return what the replaced function would."""


class _Running(threading.local):
    """The layers that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run] = []


_running = _Running()


def replacement(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for the place of `original`, which it calls for everything but enabled layers.

    Code that `torch.compile` compiles breaks its graph here, and goes on behind.
    """

    @_not_traced
    @functools.wraps(original)
    def dispatch(*arguments: Any, **keywords: Any) -> Any:
        """Run the enabled layer's operator, or the function that stood here before."""
        if not _running.runs:
            return original(*arguments, **keywords)
        run = _running.runs[-1]
        return run.operators(Call(part, original, arguments, keywords), run)

    return dispatch


@contextmanager
def guarded(layer: nn.Module, operators: Operators) -> Iterator[None]:
    """Let the layer's own calls, and no other's, reach `operators` while the block lasts."""

    @_not_traced
    def begin(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Note the run, and take padding out of the hidden states."""
        arguments, keywords, padding = _without_padding(arguments, keywords)
        _running.runs.append(Run(module, operators, padding, keywords.get("cu_seq_lens_q")))
        return arguments, keywords

    @_not_traced
    def end(*_: Any) -> None:
        """Forget the run; this happens after an exception too."""
        if _running.runs and _running.runs[-1].layer is layer:
            _running.runs.pop()

    first = layer.register_forward_pre_hook(begin, with_kwargs=True)
    last = layer.register_forward_hook(end, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()


@contextmanager
def packing_refused(model: nn.Module) -> Iterator[None]:
    """Refuse packed sequences for a model whose layers' convolution cannot be replaced, and would mix them."""

    def refuse(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:  # noqa: ARG001
        """Look for lengths; some layers are not even told of them."""
        if keywords.get("cu_seq_lens_q") is not None:
            raise UnsupportedError(
                "enable: `cu_seq_lens_q` must be left out: in this version of transformers the layers' convolution "
                "mixes packed sequences"
            )

    handle = model.register_forward_pre_hook(refuse, with_kwargs=True)
    del model  # whose end may be what ends this block
    try:
        yield
    finally:
        handle.remove()


def _without_padding(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """Return a layer's arguments with zeros for the hidden states of padding, and where the padding is.

    A mask that reaches back over cached tokens is cut to those of this call; older versions of transformers do
    neither that nor any masking where the batch has one row.
    """
    mask = keywords.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return arguments, keywords, None
    hidden = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
    n_tokens = hidden.shape[1]
    if n_tokens == 1 and mask.shape[1] != 1:
        return arguments, {**keywords, "attention_mask": None}, None
    mask = mask[:, -n_tokens:]
    padding = mask == 0
    hidden = hidden.masked_fill(padding[:, :, None], 0)
    keywords = {**keywords, "attention_mask": mask}
    if "hidden_states" in keywords:
        return arguments, {**keywords, "hidden_states": hidden}, padding
    return (hidden, *arguments[1:]), keywords, padding
