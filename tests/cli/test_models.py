"""`cgdr generate` and `cgdr record` on the small trained model: what they print, write and refuse."""

import sys
from pathlib import Path

import numpy as np
import pytest

from commands import Answer, cgdr, refused

MODEL = Path(__file__).parents[1] / "data" / "tiny_qwen3_5"
PROMPT = "def test_sums(values: list[int]) -> None:"


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (("generate",), ("record", "-o", tmp_path)):
        error = refused(arguments[0], MODEL, "--prompt", "a", *arguments[1:])
        assert f'{arguments[0]}: torch and transformers must be installed, as the extra "models" does' in error


@pytest.fixture
def models() -> None:
    """Skip where the extra is not installed."""
    pytest.importorskip("tiny_models")


@pytest.mark.slow
@pytest.mark.usefixtures("models")
class TestWithModels:
    """Where torch and transformers are installed."""

    def test_generate_compares_tokens(self) -> None:
        """Both paths, as text and as data."""
        text = cgdr("generate", MODEL, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare").out
        assert text.startswith(f"transformers: {PROMPT}")
        assert "all 12 tokens agree" in text
        found = cgdr("generate", MODEL, "--prompt", PROMPT, "--max-new-tokens", 12, "--compare", "--json").json
        assert found["tokens_agree"] is True
        assert found["tokens_are"] == "bytes"
        assert list(found["runs"]) == ["transformers", "cgdr_numba"]
        for run in found["runs"].values():
            assert (len(run["tokens"]), run["prompt_tokens"]) == (12, len(PROMPT))
            assert bytes(run["tokens"]).decode(errors="replace") == run["text"]
            assert 0 < run["operator_share_of_prefill"] < 1
            assert 0 < run["operator_share_of_decode"] < 1

    @pytest.mark.parametrize(("option", "name"), [("--backend", "cgdr_numba"), ("--no-backend", "transformers")])
    def test_generate_one_way(self, option: str, name: str) -> None:
        """With the backend, and without it."""
        found = cgdr("generate", MODEL, "--prompt", PROMPT, "--max-new-tokens", 2, option, "--json").json
        assert list(found["runs"]) == [name]
        assert found["tokens_agree"] is None

    def test_recorded_calls_replay(self, tmp_path: Path) -> None:
        """Prefill and decode calls of every layer, with golden's results beside them."""
        folder = tmp_path / "calls"
        text = cgdr("record", MODEL, "--prompt", PROMPT, "-o", folder, "--max-new-tokens", 2).out
        names = [f"layer{layer}_call{call}.safetensors" for call in (0, 1) for layer in (0, 1, 2)]
        assert text.split() == [word for name in names for word in ("wrote", str(folder / name))]
        for name in names:
            found = cgdr("run", folder / name, "--backend", "fast", "--json").json
            assert found["lengths"] == [len(PROMPT) if "call0" in name else 1]
            assert found["dims"] == {
                "n_tokens": found["lengths"][0],
                "n_sequences": 1,
                "hk": 2,
                "hv": 4,
                "dk": 128,
                "dv": 128,
            }
            assert found["errors"]["out"]["worst"] <= 1e-3
            assert found["errors"]["final_state"]["worst"] <= 1e-6

    def test_recorded_calls_are_the_models(self, tmp_path: Path) -> None:
        """The inputs of the first layer's decode call continue its prefill's final state."""
        from cgdr_numba.parity.calls import load_call
        from cgdr_numba.parity.replays import replay

        cgdr("record", MODEL, "--prompt", PROMPT, "-o", tmp_path, "--max-new-tokens", 2, "--no-expected")
        first, second = (load_call(tmp_path / f"layer0_call{i}.safetensors") for i in (0, 1))
        assert not first.expected
        assert first.metadata["layer"] == "layer0"
        assert (first.metadata["part"], second.metadata["part"]) == ("chunk", "recurrent")
        _, state = replay(first, "fast")
        # The model's keys are normalised in float32, the recorded ones rounded to float16 behind it.
        difference = np.linalg.norm(state - second.arrays["initial_state"]) / np.linalg.norm(state)
        assert difference < 1e-3
        assert np.allclose(np.linalg.norm(first.arrays["key"].astype(np.float32), axis=-1), 1, atol=2e-2)

    def test_what_is_refused(self, tmp_path: Path) -> None:
        """Folders without a model, empty prompts, dtypes."""
        assert "must hold a config.json, and there is none" in refused("generate", tmp_path, "--prompt", "a")
        assert "`prompt` must have at least one token" in refused("generate", MODEL, "--prompt", "")
        assert "`--dtype` must be float32" in refused("generate", MODEL, "--prompt", "a", "--dtype", "float64")
        (tmp_path / "file").write_text("")
        assert "must be a folder, got a file" in refused("record", MODEL, "--prompt", "a", "-o", tmp_path / "file")
        assert Answer(("generate", MODEL, "--prompt", "a", "--max-new-tokens", 0)).code == 2
