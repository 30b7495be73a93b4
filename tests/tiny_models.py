"""Small models of every covered architecture with random weights, and how runs of them are compared."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import transformers  # noqa: E402 - after what the tests are skipped without

transformers.logging.set_verbosity_error()
# These models are so small that a second thread only waits; on a busy machine it waits for long.
torch.set_num_threads(1)

TRAINED = Path(__file__).parent / "data" / "tiny_qwen3_5"
"""Folder of a small trained model over bytes."""

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_KIMI = {name: size for name, size in _COMMON.items() if name != "num_key_value_heads"} | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "eos_token_id": None,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _COMMON | _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _COMMON | _LINEAR | _EXPERTS),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _COMMON | _LINEAR | _EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", _COMMON | _LINEAR),
}

if hasattr(transformers, "KimiLinearForCausalLM"):
    _CLASSES["kimi_linear"] = ("KimiLinearForCausalLM", "KimiLinearConfig", _KIMI)

ARCHITECTURES = list(_CLASSES)
"""Those of this version of transformers."""


def build(architecture: str, dtype: str = "float32", n_words: int = 128) -> Any:
    """Return a model in eval mode over a vocabulary of n_words.

    Its linear-attention weights are three times those of a new model, so that an operator that is off by 1 % moves the
    logits by 3 %. With ten times torch's own path differs from itself, in parts and as a whole, by 1.6e-5.
    """
    kind, config_kind, sizes = _CLASSES[architecture]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config_kind)(**sizes | {"vocab_size": n_words}))
    with torch.no_grad():
        for layer in model.modules():
            if "Delta" in type(layer).__name__:
                for name, weight in layer.named_parameters():
                    weight *= 3 if "proj" in name else 1
    return model.to(getattr(torch, dtype)).eval()


def prompt(n_tokens: int = 70, batch: int = 2, n_padding: int = 9) -> tuple[Any, Any]:
    """Return token ids and the mask [B, T] of a batch whose first row begins with padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 128, (batch, n_tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :n_padding] = 0
    return ids, mask


def forward(model: Any, ids: Any, mask: Any) -> Any:
    """Return the logits of real tokens of one call, [n, V] in float32."""
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[mask.bool()].float()


def by_parts(model: Any, ids: Any, mask: Any, ends: list[int]) -> Any:
    """Return the logits of real tokens, where calls that end at `ends` continue from one cache."""
    found, cache, begin = [], None, 0
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for end in ends:
        options = {} if cache is None else {keyword: cache}
        with torch.no_grad():
            result = model(ids[:, begin:end], attention_mask=mask[:, :end], use_cache=True, **options)
        cache, begin = result.past_key_values, end
        found.append(result.logits)
    return torch.cat(found, dim=1)[mask[:, :begin].bool()].float()


def relative_rms(found: Any, expected: Any) -> float:
    """Return the root mean square of the difference over that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def states(cache: Any) -> list[Any]:
    """Return the recurrent states [B, Hv, Dk, Dv] of a cache, by layer."""
    if hasattr(cache, "layers"):
        found = [getattr(layer, "recurrent_states", None) for layer in cache.layers]
        found = [state[0] if isinstance(state, (dict, list)) else state for state in found]
    else:
        found = cache.recurrent_states
    return [state for state in found if state is not None]


def module_of(model: Any) -> Any:
    """Return the modeling file of a model."""
    return sys.modules[type(model).__module__]
