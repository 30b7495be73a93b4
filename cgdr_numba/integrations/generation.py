"""Greedy generation with a local model, with and without the backend: text, times, the operator's share of them."""

import inspect
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cgdr_numba.errors import ContractError
from cgdr_numba.integrations.transformers import observed
from cgdr_numba.integrations.transformers.guard import Call, Operators, Run
from cgdr_numba.integrations.transformers.operators import OurOperators

DTYPES = ("float32", "bfloat16", "float16", "auto")
"""What a model's weights can be loaded as; auto: as they are stored."""

_N_BYTES = 256


@dataclass(frozen=True, slots=True)
class Text:
    """How a model's tokens are text: by its tokenizer, or as bytes."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    kind: str


@dataclass(slots=True)
class Generation:
    """One greedy run."""

    tokens: list[int] = field(default_factory=list)
    """The new tokens."""
    n_prompt: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_operator_seconds: float = 0.0
    decode_operator_seconds: float = 0.0

    def rate(self, part: str) -> float:
        """Return tokens a second of "prefill" or "decode"; NaN where there were none."""
        n_tokens = self.n_prompt if part == "prefill" else len(self.tokens) - 1
        seconds = self.prefill_seconds if part == "prefill" else self.decode_seconds
        return n_tokens / seconds if n_tokens > 0 else float("nan")

    def share(self, part: str) -> float:
        """Return the operator's share of the time of "prefill" or "decode"; NaN where there was none."""
        times = (self.prefill_operator_seconds, self.prefill_seconds)
        if part == "decode":
            times = (self.decode_operator_seconds, self.decode_seconds)
        return times[0] / times[1] if times[1] > 0 else float("nan")


class _Timed:
    """Operators with a stopwatch."""

    def __init__(self, operators: Operators | None) -> None:
        """Take what is to run; None leaves transformers' own functions."""
        self.operators = operators
        self.seconds = 0.0

    def __call__(self, call: Call, run: Run) -> Any:
        """Run a call; convolutions are not counted."""
        begin = time.perf_counter()
        result = call.run_original() if self.operators is None else self.operators(call, run)
        if call.part != "convolution":
            self.seconds += time.perf_counter() - begin
        return result


def load_model(folder: Path, dtype: str) -> nn.Module:
    """Return a causal language model in eval mode from a folder; nothing is downloaded.

    Raises:
        ContractError: There is no such folder or no model in it, or the dtype is not one of `DTYPES`.
    """
    if not (folder / "config.json").is_file():
        raise ContractError(f"{folder}: the folder of a model must hold a config.json, and there is none")
    if dtype not in DTYPES:
        raise ContractError(f"`--dtype` must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    except (OSError, ValueError) as reason:
        raise ContractError(f"{folder}: no model can be loaded: {' '.join(str(reason).split())}") from reason
    return model.eval()


def load_text(folder: Path, model: nn.Module) -> Text:
    """Return a model's tokenizer; where the folder has none, and the vocabulary is that of bytes, bytes.

    Raises:
        ContractError: There is no tokenizer, and the vocabulary is another.
    """
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return Text(tokenizer.encode, tokenizer.decode, "the folder's tokenizer")
    n_words = model.config.vocab_size
    if n_words != _N_BYTES:
        raise ContractError(
            f"{folder}: the folder must hold a tokenizer where the vocabulary is not that of bytes ({_N_BYTES}), "
            f"got {n_words} words"
        )
    return Text(lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"), "bytes")


def check_request(op: str, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse an empty prompt, and a request for no token."""
    if not prompt:
        raise ContractError(f"{op}: `prompt` must have at least one token, got none")
    if max_new_tokens < 1:
        raise ContractError(f"{op}: `max_new_tokens` must be at least 1, got {max_new_tokens}")


def generate(
    model: nn.Module, prompt: list[int], max_new_tokens: int, *, backend: bool = True, threads: int | None = None
) -> Generation:
    """Generate greedily, with the layers' operators here or (backend=False) transformers' own, and take the times.

    Args:
        model: A causal language model in eval mode.
        prompt: Token ids, at least one.
        max_new_tokens: How many are generated at the most, at least one; an end-of-text token ends it before.
        backend: Whether the layers run the operators of this package.
        threads: Threads for them; None takes numba's setting.

    Returns:
        The new tokens and the times.

    Raises:
        ContractError: The prompt is empty, or no token is asked for.
        UnsupportedError: The model has no layer that is covered.
    """
    check_request("generate", prompt, max_new_tokens)
    meters: dict[str, _Timed] = {}

    def timed(operator: str) -> _Timed:
        """Return a stopwatch around the operators of one kind of layer."""
        meters[operator] = _Timed(OurOperators(operator, threads, Counter()) if backend else None)
        return meters[operator]

    with observed(model, timed), torch.inference_mode():
        _greedy(model, prompt[:64], 2, meters)  # compiles, or loads compiled code, and touches every weight
        return _greedy(model, prompt, max_new_tokens, meters)


def _greedy(model: nn.Module, prompt: list[int], max_new_tokens: int, meters: dict[str, _Timed]) -> Generation:
    """Run the prompt, then token by token."""
    run = Generation(n_prompt=len(prompt))
    ends = _end_tokens(model)
    ids, cache = torch.tensor([prompt]), None
    for _ in range(max_new_tokens):
        for meter in meters.values():
            meter.seconds = 0.0
        begin = time.perf_counter()
        logits, cache = step(model, ids, cache)
        token = int(logits[0, -1].argmax())
        seconds, in_operator = time.perf_counter() - begin, sum(meter.seconds for meter in meters.values())
        if run.tokens:
            run.decode_seconds += seconds
            run.decode_operator_seconds += in_operator
        else:
            run.prefill_seconds, run.prefill_operator_seconds = seconds, in_operator
        run.tokens.append(token)
        if token in ends:
            break
        ids = torch.tensor([[token]])
    return run


def step(model: nn.Module, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Run one call that continues from a cache (None: from nothing); returns the last token's logits and the cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    before = {} if cache is None else {name: cache}
    result = model(ids, use_cache=True, logits_to_keep=1, **before)
    return result.logits, result.past_key_values


def _end_tokens(model: nn.Module) -> set[int]:
    """Return the tokens that end a text."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
