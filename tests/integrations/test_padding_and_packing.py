"""What transformers' own path refuses or leaks: padding on either side, packed sequences, continued calls."""

from typing import Any

import pytest

from cgdr_numba import UnsupportedError

tiny = pytest.importorskip("tiny_models")
adapter = pytest.importorskip("cgdr_numba.integrations.transformers")
torch = tiny.torch

pytestmark = pytest.mark.slow

BOUND = 1e-5


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.build(request.param)


def run(model: Any, ids: Any, mask: Any) -> tuple[Any, list[Any]]:
    """Return the logits of a call and the recurrent states after it."""
    with torch.no_grad(), adapter.enabled(model):
        result = model(ids, attention_mask=mask, use_cache=True)
    return result.logits, tiny.states(result.past_key_values)


def alone(model: Any, ids: Any) -> tuple[Any, list[Any]]:
    """Return the same for one row without padding."""
    return run(model, ids[None], torch.ones_like(ids)[None])


@pytest.mark.parametrize("batch", [1, 2])
def test_t061_left_padding_is_as_if_it_were_not_there(model: Any, batch: int) -> None:
    ids, mask = tiny.prompt(8, batch, n_padding=3)
    logits, states = run(model, ids, mask)
    expected, expected_states = alone(model, ids[0, 3:])
    assert tiny.relative_rms(logits[0, 3:], expected[0]) <= BOUND
    for found, reference in zip(states, expected_states, strict=True):
        assert tiny.relative_rms(found[0], reference[0]) <= BOUND
    other = ids.clone()
    other[0, :3] = torch.tensor([127, 5, 77])
    again, same = run(model, other, mask)
    # Not to the bit: experts take the tokens of a batch together, padding too.
    assert tiny.relative_rms(again[0, 3:], logits[0, 3:]) <= BOUND
    assert all(tiny.relative_rms(a[0], b[0]) <= BOUND for a, b in zip(same, states, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
def test_t062_right_padding_neither_decays_nor_writes(model: Any, batch: int) -> None:
    ids, mask = tiny.prompt(25, batch, n_padding=0)
    mask[0, 20:] = 0
    logits, states = run(model, ids, mask)
    expected, expected_states = alone(model, ids[0, :20])
    assert tiny.relative_rms(logits[0, :20], expected[0]) <= BOUND
    for found, reference in zip(states, expected_states, strict=True):
        assert tiny.relative_rms(found[0], reference[0]) <= BOUND


def test_t062_through_torchs_path_the_state_decays() -> None:
    model = tiny.build("qwen3_5")
    ids, mask = tiny.prompt(25, n_padding=0)
    mask[0, 20:] = 0
    with torch.no_grad():
        theirs = tiny.states(model(ids, attention_mask=mask, use_cache=True).past_key_values)
    _, expected = alone(model, ids[0, :20])
    assert tiny.relative_rms(theirs[0][0], expected[0][0]) > 0.01


@pytest.mark.parametrize("split", [4, 9, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_t064_padding_in_continued_calls(model: Any, split: int, batch: int) -> None:
    ids, mask = tiny.prompt(40, batch)
    with adapter.enabled(model):
        found = tiny.by_parts(model, ids, mask, [split, 30, 31, 40])[: 40 - 9]
    expected, _ = alone(model, ids[0, 9:])
    assert tiny.relative_rms(found, expected[0]) <= BOUND


@pytest.mark.parametrize("side", ["left", "right"])
def test_t065_short_rows_beside_long_ones(model: Any, side: str) -> None:
    ids, mask = tiny.prompt(60, n_padding=0)
    real = slice(55, 60) if side == "left" else slice(0, 5)
    mask[0] = 0
    mask[0, real] = 1
    logits, states = run(model, ids, mask)
    for row, tokens in ((0, real), (1, slice(0, 60))):
        expected, expected_states = alone(model, ids[row, tokens])
        assert tiny.relative_rms(logits[row, tokens], expected[0]) <= BOUND
        for found, reference in zip(states, expected_states, strict=True):
            assert tiny.relative_rms(found[row], reference[0]) <= BOUND


@pytest.mark.parametrize("lengths", [[30, 7, 1, 32], [70], [3, 67]])
def test_packed_sequences_are_kept_apart(model: Any, lengths: list[int]) -> None:
    ids, _ = tiny.prompt(70, 1, 0)
    sums = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = {"position_ids": positions, "cu_seq_lens_q": sums.int(), "cu_seq_lens_k": sums.int()}
    keeps_apart = model.config.model_type != "olmo_hybrid" or hasattr(tiny.module_of(model), "causal_conv1d_fn")
    with torch.no_grad(), adapter.enabled(model):
        if not keeps_apart:
            with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
                model(ids, **packed, use_cache=False)
            return
        found = model(ids, **packed, use_cache=False).logits[0]
        expected = torch.cat([model(part, use_cache=False).logits[0] for part in ids.split(lengths, dim=1)])
        assert tiny.relative_rms(found, expected) <= BOUND


def test_a_cached_call_of_many_tokens_continues() -> None:
    model = tiny.build("qwen3_next")
    ids, mask = tiny.prompt(70, n_padding=0)
    with adapter.enabled(model):
        whole = tiny.forward(model, ids, mask)
        parts = tiny.by_parts(model, ids, mask, [1, 2, 18, 19, 50, 70])
    assert tiny.relative_rms(parts, whole) <= BOUND
