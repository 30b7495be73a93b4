"""`cgdr record` on layers with one log decay a channel: files of calls over a pool, which replay as the model ran."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cgdr_numba import fused_recurrent_kda
from cgdr_numba.parity.calls import RecordedCall, load_call
from cgdr_numba.parity.operators import RECURRENT_OPERATOR
from cgdr_numba.parity.replays import replay
from commands import cgdr, refused

torch = pytest.importorskip("torch")
models = pytest.importorskip("tiny_models")
recording = pytest.importorskip("cgdr_numba.integrations.recording")
operators = pytest.importorskip("cgdr_numba.integrations.transformers.operators")

HK, HV, DK, DV = 1, 2, 8, 6
PROMPT = "def test_sums(values):"


def inputs_of(batch: int, n_tokens: int, cu_seqlens: Any, with_state: bool, normalise: bool) -> Any:
    """Return what a layer gives its operator; g is [B, T, Hv, Dk]."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    n_sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    return operators.Inputs(
        random(batch, n_tokens, HK, DK),
        random(batch, n_tokens, HK, DK) / 3,
        random(batch, HV, n_tokens, DV).transpose(1, 2),
        -random(batch, n_tokens, HV, DK).abs(),
        random(batch, n_tokens, HV).sigmoid(),
        random(n_sequences, HV, DK, DV) if with_state else None,
        True,
        normalise,
        cu_seqlens,
    )


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_pool_with_a_slot_a_sequence_has_the_calls_bits(packed: bool, with_state: bool) -> None:
    """Rows of a batch, or packed sequences of which one is empty."""
    sums = torch.tensor([0, 3, 3, 12]) if packed else None
    inputs = inputs_of(1 if packed else 3, 12, sums, with_state, normalise=False)
    arrays = recording.pool_arrays(inputs)
    lengths = [3, 0, 9] if packed else [12, 12, 12]
    assert arrays["actual_seq_lengths"].tolist() == lengths
    assert arrays["ssm_state_indices"].tolist() == [n for n, length in enumerate(lengths) for _ in range(length)]
    call = RecordedCall("call", RECURRENT_OPERATOR, arrays, {}, DK**-0.5, {})
    out, pool = replay(call, "fast")
    expected, state = fused_recurrent_kda(**inputs._asdict())
    assert np.array_equal(out, expected.flatten(0, 1).numpy())
    assert np.array_equal(pool, state.transpose(2, 3).numpy())


def test_keys_are_recorded_normalised() -> None:
    inputs = inputs_of(2, 5, None, True, normalise=True)
    arrays = recording.pool_arrays(inputs)
    assert np.allclose(np.linalg.norm(arrays["key"], axis=-1), 1, atol=1e-5)
    out, _ = replay(RecordedCall("call", RECURRENT_OPERATOR, arrays, {}, DK**-0.5, {}), "golden")
    expected, _ = fused_recurrent_kda(**inputs._asdict())
    np.testing.assert_allclose(out, expected.flatten(0, 1), rtol=0, atol=1e-5)


needs_kimi = pytest.mark.skipif(
    "kimi_linear" not in models.ARCHITECTURES, reason="this version of transformers has no kimi_linear"
)


@needs_kimi
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_of_a_kimi_linear_model(dtype: str, tmp_path: Path) -> None:
    """A prefill and two decode calls of every linear-attention layer, each going on behind the one before."""
    model = models.build("kimi_linear", dtype)
    paths = recording.record(model, list(range(1, 21)), tmp_path / "calls", max_new_tokens=3)
    assert [path.name for path in paths] == [
        f"layer{layer}_call{call}.safetensors" for call in (0, 1, 2) for layer in (0, 1, 2)
    ]
    calls = [load_call(path) for path in paths]
    for call in calls:
        n_tokens = 20 if call.metadata["part"] == "chunk" else 1
        assert (call.operator, call.arrays["gk"].shape) == (RECURRENT_OPERATOR, (n_tokens, 4, 16))
        assert {name: array.dtype.name for name, array in call.expected.items()} == {"out": dtype, "state": "float32"}
        assert "g" not in call.arrays
    for before, after in zip(calls[:-3], calls[3:], strict=True):
        _, pool = replay(before, "fast")
        difference = np.linalg.norm(pool - after.arrays["state"]) / np.linalg.norm(pool)
        # The model's keys are normalised in float32, the recorded ones rounded to their dtype behind it.
        assert difference < (1e-6 if dtype == "float32" else 1e-2)


@needs_kimi
@pytest.mark.slow
def test_the_commands_take_them(tmp_path: Path) -> None:
    folder, calls = tmp_path / "model", tmp_path / "calls"
    models.build("kimi_linear", n_words=256).save_pretrained(folder)
    text = cgdr("record", folder, "--prompt", PROMPT, "-o", calls, "--max-new-tokens", 2).out
    assert len(text.split()) == 2 * 2 * 3
    for n, length in ((0, len(PROMPT)), (1, 1)):
        path = calls / f"layer1_call{n}.safetensors"
        for backend in ("golden", "fast", "faithful")[: 2 + n]:
            found = cgdr("run", path, "--backend", backend, "--json").json
            assert (found["operator"], found["lengths"]) == (RECURRENT_OPERATOR, [length])
            assert found["errors"]["out"]["worst"] <= 1e-3
            assert found["errors"]["state"]["worst"] <= 1e-5
    assert "310P RecurrentGatedDeltaRule" in cgdr("plan", calls / "layer1_call1.safetensors").out
    error = refused("run", calls / "layer1_call0.safetensors")
    assert f"`lengths` must be at most 8 tokens a sequence for the 310P's kernel, got {len(PROMPT)}" in error
