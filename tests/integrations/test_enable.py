"""What `enable` replaces, whom it reaches, what it refuses, and that `disable` puts the original functions back."""

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest

from cgdr_numba import ContractError, UnsupportedError

tiny = pytest.importorskip("tiny_models")
adapter = pytest.importorskip("cgdr_numba.integrations.transformers")
routes = pytest.importorskip("cgdr_numba.integrations.transformers.routes")
architectures = pytest.importorskip("cgdr_numba.integrations.transformers.architectures")
torch = tiny.torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def functions(model: Any) -> list[Any]:
    """Everything that `enable` could have replaced in a model and its modeling file."""
    module = tiny.module_of(model)
    found = [
        getattr(module, name, None)
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    ]
    found += [function.__dict__.get("forward") for function in found if isinstance(function, torch.nn.Module)]
    for part in model.modules():
        held = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "causal_conv1d_fn", "_update_linear_attn_mask")
        found += [part.__dict__.get(name) for name in held]
        found += [part.__dict__.get("forward"), len(part._forward_hooks), len(part._forward_pre_hooks)]
    return found


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(a is b for a, b in zip(found, expected, strict=True))


@pytest.fixture
def model() -> Any:
    return tiny.build("qwen3_5")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_disable_puts_the_original_functions_back(architecture: str) -> None:
    model = tiny.build(architecture)
    before = functions(model)
    report = adapter.enable(model)
    assert adapter.enable(model) is report
    assert not same(functions(model), before)
    adapter.disable(model)
    assert same(functions(model), before)
    adapter.disable(model)
    assert same(functions(model), before)


def test_nested_blocks_and_exceptions(model: Any) -> None:
    before = functions(model)
    with pytest.raises(RuntimeError, match="in the middle"), adapter.enabled(model) as outer:
        with adapter.enabled(model) as inner:
            assert inner is outer
        assert not same(functions(model), before)
        raise RuntimeError("in the middle")
    assert same(functions(model), before)


def test_an_exception_inside_of_a_layer_leaves_no_trace(model: Any) -> None:
    ids, mask = tiny.prompt(10)
    other = tiny.build("qwen3_5")
    with adapter.enabled(model) as report:
        with pytest.raises(RuntimeError, match="of the layer"), torch.no_grad():
            handle = model.model.layers[1].linear_attn.norm.register_forward_hook(_raise)
            model(ids, attention_mask=mask)
        handle.remove()
        calls = dict(report.calls)
        tiny.forward(other, ids, mask)
        assert report.calls == calls


def _raise(*_: Any) -> None:
    raise RuntimeError("of the layer")


def test_models_are_enabled_one_by_one(model: Any) -> None:
    ids, mask = tiny.prompt(20)
    other = tiny.build("qwen3_5")
    before, expected = functions(other), tiny.forward(other, ids, mask)
    first = adapter.enable(model)
    assert torch.equal(tiny.forward(other, ids, mask), expected)
    assert not first.calls
    second = adapter.enable(other)
    adapter.disable(model)
    found = tiny.forward(other, ids, mask)
    assert second.calls == {"cgdr_numba": 3}
    assert not torch.equal(found, expected)
    assert not first.calls
    adapter.disable(other)
    assert same(functions(other), before)
    assert torch.equal(tiny.forward(other, ids, mask), expected)


def test_threads_run_enabled_and_other_models_side_by_side(model: Any) -> None:
    ids, mask = tiny.prompt(20)
    other = tiny.build("qwen3_5")
    expected = tiny.forward(other, ids, mask)
    with adapter.enabled(model):
        ours = tiny.forward(model, ids, mask)
        assert not torch.equal(ours, expected)
        found: dict[str, list[Any]] = {"ours": [], "other": []}

        def work(name: str, which: Any) -> None:
            found[name] = [tiny.forward(which, ids, mask) for _ in range(5)]

        threads = [threading.Thread(target=work, args=pair) for pair in (("ours", model), ("other", other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(x, ours) for x in found["ours"])
    assert all(torch.equal(x, expected) for x in found["other"])
    assert {name: len(runs) for name, runs in found.items()} == {"ours": 5, "other": 5}


def test_a_model_that_is_gone_leaves_nothing_replaced(model: Any) -> None:
    module, alive = tiny.module_of(model), weakref.ref(model)
    before = module.torch_chunk_gated_delta_rule
    adapter.enable(model)
    del model
    gc.collect()
    if alive() is None:  # the fixture may still hold it
        assert module.torch_chunk_gated_delta_rule is before
    else:
        adapter.disable(alive())
    own = tiny.build("qwen3_5")
    adapter.enable(own)
    alive = weakref.ref(own)
    del own
    gc.collect()
    assert alive() is None
    assert module.torch_chunk_gated_delta_rule is before


def test_somebody_elses_replacement_on_top_stays(model: Any) -> None:
    module = tiny.module_of(model)
    original = module.torch_chunk_gated_delta_rule
    if adapter.enable(model).route != "module":
        adapter.disable(model)
        pytest.skip("other routes touch no globals")
    try:
        ours = module.torch_chunk_gated_delta_rule
        module.torch_chunk_gated_delta_rule = theirs = lambda *x, **y: ours(*x, **y)
        adapter.disable(model)
        assert module.torch_chunk_gated_delta_rule is theirs
        tiny.forward(model, *tiny.prompt(10))
    finally:
        module.torch_chunk_gated_delta_rule = original


def test_calls_that_record_gradients_go_to_the_original(model: Any) -> None:
    ids, mask = tiny.prompt(10)
    with adapter.enabled(model) as report:
        with pytest.warns(UserWarning, match=r"gradients are recorded, .* torch.inference_mode\(\)"):
            model(ids, attention_mask=mask).logits.sum().backward()
        assert report.calls == {"original": 3}
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model(ids, attention_mask=mask).logits.sum().backward()
        assert report.calls == {"original": 6}
        model.eval()
        with torch.inference_mode():
            model(ids, attention_mask=mask)
        assert report.calls == {"original": 6, "cgdr_numba": 3}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_models_break_their_graph_at_the_operator(model: Any) -> None:
    ids, mask = tiny.prompt(16, n_padding=0)
    torch.compiler.reset()
    with adapter.enabled(model) as report:
        expected = tiny.forward(model, ids, mask)
        found = tiny.forward(torch.compile(model, backend="eager"), ids, mask)
    assert torch.equal(found, expected)
    assert report.calls == {"cgdr_numba": 6}
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_states_of_any_dtype_and_stray_keywords(model: Any, dtype: str) -> None:
    layer = model.model.layers[0].linear_attn
    guard = pytest.importorskip("cgdr_numba.integrations.transformers.guard")
    operators = pytest.importorskip("cgdr_numba.integrations.transformers.operators")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, heads, 16, generator=generator) for heads in (2, 2, 4))
    gates = {"g": -torch.rand(1, 1, 4), "beta": torch.rand(1, 1, 4)}
    state = torch.randn(1, 4, 16, 16, generator=generator).to(getattr(torch, dtype))
    # Before 5.23 the function wants as many key heads as value heads.
    repeated = [x.repeat_interleave(2, dim=2) for x in (q, k)]
    expected = tiny.module_of(model).torch_recurrent_gated_delta_rule(
        *repeated, v, **gates, initial_state=state.float(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    run = guard.Run(layer, operators.OurOperators("gdr", None, adapter.Counter()), None, None)
    keywords = {
        **gates,
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": None,
        "use_cache": True,
        "output_router_logits": False,
        "chunk_size": 64,
    }
    out, final = run.operators(guard.Call("recurrent", _raise, (q, k, v), keywords), run)
    assert tiny.relative_rms(out, expected[0]) < 1e-6
    assert tiny.relative_rms(final, expected[1]) < 1e-6
    assert final.dtype is torch.float32
    with pytest.raises(UnsupportedError, match="a layer gives `scale`"):
        run.operators(guard.Call("recurrent", _raise, (q, k, v), {**keywords, "scale": 0.5}), run)


def test_cached_states_are_not_held(model: Any) -> None:
    ids, mask = tiny.prompt(10)
    with adapter.enabled(model), torch.no_grad():
        result = model(ids, attention_mask=mask, use_cache=True)
        state = weakref.ref(tiny.states(result.past_key_values)[0])
        logits = result.logits.clone()
        again = model(ids, attention_mask=mask, use_cache=True)
        assert torch.equal(again.logits, logits)
        assert tiny.states(again.past_key_values)[0].data_ptr() != tiny.states(result.past_key_values)[0].data_ptr()
        del result, again
    gc.collect()
    assert state() is None


class TestRefusals:
    """Models and versions that are not known, and what cannot run."""

    def test_other_models(self) -> None:
        """A model without the layers."""
        with pytest.raises(UnsupportedError, match=r"linear-attention layers of .*qwen3_next, got Linear with none"):
            adapter.enable(torch.nn.Linear(1, 1))

    def test_other_versions(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Too old, too new by number, and one whose functions are not found."""
        for version in ("4.57.1", "5.11.0", "6.0.0"):
            monkeypatch.setattr(adapter.transformers, "__version__", version)
            with pytest.raises(UnsupportedError, match=rf"5.12 or later, below 6 .* got {version}"):
                adapter.enable(model)
        monkeypatch.setattr(adapter.transformers, "__version__", "5.99.0")
        rule = architectures.Rule("gdr", "other_name", "another_name")
        monkeypatch.setitem(architectures.COVERED, "Qwen3_5GatedDeltaNet", ("qwen3_5", rule))
        for layer in model.modules():
            layer.__dict__.pop("chunk_gated_delta_rule", None)
        with pytest.raises(UnsupportedError, match=r"transformers 5.99.0 calls the operator of Qwen3_5GatedDeltaNet"):
            adapter.enable(model)

    def test_other_devices(self) -> None:
        """A model without memory."""
        model = tiny.build("qwen3_5").to("meta")
        with pytest.raises(UnsupportedError, match=r"in the CPU's memory, got model.layers.0.linear_attn.* on meta"):
            adapter.enable(model)

    def test_layers_of_an_enabled_model(self, model: Any) -> None:
        """Through a part of it, and with other threads."""
        with adapter.enabled(model):
            with pytest.raises(ContractError, match=r"`layers.0.linear_attn` is enabled already"):
                adapter.enable(model.model)
            with pytest.raises(ContractError, match="`threads` must be as before, None"):
                adapter.enable(model, threads=1)
        before = functions(model)
        with adapter.enabled(model.model, threads=1) as report:
            tiny.forward(model, *tiny.prompt(10))
        assert report.calls == {"cgdr_numba": 3}
        assert same(functions(model), before)
