"""Models of every covered architecture: the same results with the operators of this package as with torch's."""

from importlib.util import find_spec
from typing import Any

import pytest

tiny = pytest.importorskip("tiny_models")
adapter = pytest.importorskip("cgdr_numba.integrations.transformers")
torch, transformers = tiny.torch, tiny.transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

F32_LOGITS = 1e-5
BF16_RATIO = 1.1


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.build(request.param)


def expected_route() -> str:
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version <= (5, 12):
        return "attributes"
    return "kernels" if find_spec("kernels") and transformers.utils.is_kernels_available() else "module"


def test_report_names_route_and_layers(model: Any) -> None:
    with adapter.enabled(model) as report:
        assert report.route == expected_route()
        assert len(report.layers) == sum(kind == "linear_attention" for kind in model.config.layer_types) == 3
        assert report.architectures[0] in report.layers[0] + str(report)
        tiny.forward(model, *tiny.prompt(20))
    assert report.calls == {"cgdr_numba": 3}
    tiny.forward(model, *tiny.prompt(20))
    assert report.calls == {"cgdr_numba": 3}


def test_prefill_padded_batches_and_decode(model: Any) -> None:
    ids, mask = tiny.prompt(140)
    ends = [76, *range(77, 141)]
    expected, steps = tiny.forward(model, ids, mask), tiny.by_parts(model, ids, mask, ends)
    with adapter.enabled(model) as report:
        assert tiny.relative_rms(tiny.forward(model, ids, mask), expected) <= F32_LOGITS
        assert tiny.relative_rms(tiny.by_parts(model, ids, mask, ends), steps) <= F32_LOGITS
        # One prompt in several calls, of which the second and third continue from the cache.
        assert tiny.relative_rms(tiny.by_parts(model, ids, mask, [33, 35, 140]), expected) <= F32_LOGITS
    assert report.calls == {"cgdr_numba": 3 * (1 + 65 + 3)}


def test_greedy_generation_gives_the_same_tokens(model: Any) -> None:
    ids, mask = tiny.prompt()
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(ids, **options)
        with adapter.enabled(model) as report:
            assert torch.equal(model.generate(ids, **options), expected)
    assert report.calls == {"cgdr_numba": 3 * 16}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_bfloat16_errs_as_torch_does(architecture: str) -> None:
    ids, mask = tiny.prompt(140)
    half, single = tiny.build(architecture, "bfloat16"), tiny.build(architecture)
    single.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    ends = [76, *range(77, 141)]
    exact = tiny.forward(single, ids, mask)
    theirs = [tiny.forward(half, ids, mask), tiny.by_parts(half, ids, mask, ends)]
    with adapter.enabled(half):
        ours = [tiny.forward(half, ids, mask), tiny.by_parts(half, ids, mask, ends)]
    for found, reference in zip(ours, theirs, strict=True):
        assert tiny.relative_rms(found, exact) <= BF16_RATIO * tiny.relative_rms(reference, exact)


def test_the_comparison_sees_a_wrong_operator(model: Any) -> None:
    ids, mask = tiny.prompt()
    expected = tiny.forward(model, ids, mask)

    def wrong(call: Any, _: Any) -> Any:
        result = call.run_original()
        return result if call.part == "convolution" else (result[0] * 1.0 + 0.01 * result[0].flip(1), result[1])

    with adapter.observed(model, lambda _: wrong):
        assert tiny.relative_rms(tiny.forward(model, ids, mask), expected) > 10 * F32_LOGITS


def test_trained_model_gives_the_same_logits_and_text() -> None:
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(tiny.TRAINED, dtype=torch.float32).eval()
    ids = torch.tensor([list(b'def test_sums(values: list[int]) -> None:\n    """Sums')])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    expected = tiny.forward(model, ids, mask)
    with torch.no_grad():
        tokens = model.generate(ids, **options)
        with adapter.enabled(model):
            assert tiny.relative_rms(tiny.forward(model, ids, mask), expected) <= F32_LOGITS
            assert torch.equal(model.generate(ids, **options), tokens)
