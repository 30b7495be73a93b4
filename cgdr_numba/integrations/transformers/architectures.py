"""Which layers of transformers' models are the operator's, and under which names they call it."""

from typing import Any, NamedTuple

from torch import nn

from cgdr_numba.errors import UnsupportedError

OLDEST, NEWEST = (5, 12), (5, 24)
"""The first and the last minor version of transformers that this was run with."""


class Rule(NamedTuple):
    """The functions by which a family of layers calls its operator."""

    operator: str
    """What the family computes: "gdr", one log decay a head, or "kda", one a head and key element."""
    chunk: str
    """Name in the modeling file of the function for many tokens."""
    recurrent: str
    """Name in the modeling file of the function for one token."""


class Layer(NamedTuple):
    """One layer that can be reached."""

    name: str
    """Its place in the model, as `named_modules` has it."""
    module: nn.Module
    file: str
    """The modeling file, as a module name."""
    rule: Rule

    @property
    def architecture(self) -> str:
        """The folder of the modeling file, such as "qwen3_next"."""
        return self.file.split(".")[-2]


GDR = Rule("gdr", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KDA = Rule("kda", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")

COVERED = {
    "Qwen3NextGatedDeltaNet": ("qwen3_next", GDR),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", GDR),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", GDR),
    "OlmoHybridGatedDeltaNet": ("olmo_hybrid", GDR),
    "KimiLinearDeltaAttention": ("kimi_linear", KDA),
}
"""By the layer's class: the folder of its modeling file, and how it calls the operator."""


def find_layers(op: str, model: nn.Module) -> list[Layer]:
    """Return the layers of a model that can be reached.

    Raises:
        UnsupportedError: There are none.
    """
    layers = [
        Layer(name, module, *known)
        for name, module in model.named_modules()
        if (known := _known(type(module))) is not None
    ]
    if not layers:
        listed = ", ".join(sorted({folder for folder, _ in COVERED.values()}))
        raise UnsupportedError(
            f"{op}: `model` must have linear-attention layers of {listed}, got {type(model).__qualname__} with none"
        )
    return layers


def _known(kind: type[Any]) -> tuple[str, Rule] | None:
    """Return the modeling file and the rule of a layer's class, or of the covered class that it derives from."""
    for base in kind.__mro__:
        folder, rule = COVERED.get(base.__name__, ("", GDR))
        file = f"transformers.models.{folder}.modeling_{folder}"
        if folder and base.__module__ == file:
            return file, rule
    return None


def check_version(op: str, version: str) -> None:
    """Refuse versions of transformers that are older than what was run; newer ones are checked by what they have."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST or numbers[0] != OLDEST[0]:
        raise UnsupportedError(
            f"{op}: transformers must be {OLDEST[0]}.{OLDEST[1]} or later, below {OLDEST[0] + 1} (run with "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}), got {version}"
        )
