"""What an enabled layer's calls come to: decode steps repeated by address, and everything that is not like the last."""

from collections import Counter
from typing import Any

import numba
import pytest

from cgdr_numba import UnsupportedError, fused_recurrent_gated_delta_rule, last_call

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cgdr_numba.integrations.transformers.guard import Call, Run  # noqa: E402
from cgdr_numba.integrations.transformers.operators import OurOperators  # noqa: E402

HK, HV, D = 1, 2, 16


class Layer:
    """An operator with the calls of one layer."""

    def __init__(self, threads: int | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.operators = OurOperators("gdr", threads, self.counts)
        self.module = torch.nn.Linear(1, 1).eval()

    def __call__(self, given: dict[str, Any], padding: Any = None, part: str = "recurrent", **others: Any) -> Any:
        """Give the operator a layer's call."""
        keywords = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": None, "use_cache": True}
        arguments = tuple(given[name] for name in ("query", "key", "value"))
        rest = {name: x for name, x in given.items() if name not in ("query", "key", "value")}
        call = Call(part, lambda *_, **__: "original", arguments, {**rest, **keywords, **others})
        return self.operators(call, Run(self.module, self.operators, padding, None))


def given_of(seed: int, batch: int = 2, state_dtype: Any = torch.float32, hv: int = HV) -> dict[str, Any]:
    """What a layer gives for one token of each row."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 1, heads, D, generator=generator) for heads in (HK, HK, hv))
    gates = torch.rand(batch, 1, hv, generator=generator)
    state = torch.randn(batch, hv, D, D, generator=generator).to(state_dtype)
    return {"query": q, "key": k, "value": v, "g": -gates, "beta": gates, "initial_state": state}


def expected_of(given: dict[str, Any], normalise: bool = True) -> tuple[Any, Any]:
    result: tuple[Any, Any] = fused_recurrent_gated_delta_rule(
        given["query"],
        given["key"],
        given["value"],
        g=given["g"],
        beta=given["beta"],
        initial_state=given["initial_state"].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )
    return result


def agrees(layer: Layer, given: dict[str, Any], normalise: bool = True, **others: Any) -> bool:
    """Whether a call has the function's bits, and moves the state on where it lies."""
    out, final = expected_of(given, normalise)
    result, state = layer(given, use_qk_l2norm_in_kernel=normalise, **others)
    return torch.equal(result, out) and torch.equal(state, final) and state is given["initial_state"]


@torch.no_grad()
def test_steps_that_follow_one_another_have_the_functions_bits() -> None:
    layer = Layer()
    for seed, batch, normalise in (
        (0, 2, True),
        (1, 2, True),
        (2, 2, False),
        (3, 3, False),
        (4, 2, True),
        (5, 2, True),
    ):
        assert agrees(layer, given_of(seed, batch), normalise)
    assert layer.counts == {"cgdr_numba": 6}


@torch.no_grad()
def test_padding_neither_decays_nor_writes_after_a_step_without() -> None:
    layer = Layer()
    assert agrees(layer, given_of(0))
    given = given_of(1)
    before = given["initial_state"].clone()
    _, state = layer(given, padding=torch.tensor([[True], [False]]))
    assert torch.equal(state[0], before[0])
    assert not torch.equal(state[1], before[1])
    assert agrees(layer, given_of(2))


@torch.no_grad()
def test_arguments_that_would_change_results_are_refused_at_every_step() -> None:
    layer = Layer()
    for seed in range(3):
        given = given_of(seed)
        before = given["initial_state"].clone()
        with pytest.raises(UnsupportedError, match="a layer gives `scale`"):
            layer(given, scale=0.5)
        assert torch.equal(given["initial_state"], before)
        assert agrees(layer, given, scale=None, state_v_first=False)


@torch.no_grad()
def test_states_of_other_dtypes_and_none_are_not_moved_on_in_place() -> None:
    layer = Layer()
    assert agrees(layer, given_of(0))
    for dtype in (torch.bfloat16, torch.float32):
        given = given_of(1, state_dtype=dtype)
        if dtype is torch.float32:
            given["initial_state"] = given["initial_state"].transpose(2, 3)
        before = given["initial_state"].clone()
        out, final = expected_of(given)
        result, state = layer(given)
        assert torch.equal(result, out)
        assert torch.equal(state, final)
        assert torch.equal(given["initial_state"], before)
    out, state = layer({**given_of(2), "initial_state": None})
    assert (out.shape, state.shape) == ((2, 1, HV, D), (2, HV, D, D))
    assert layer(given_of(3), output_final_state=False)[1] is None


def test_gradients_go_to_the_original_function_after_a_step_without() -> None:
    layer = Layer()
    with torch.no_grad():
        assert agrees(layer, given_of(0))
    given = given_of(1)
    given["value"].requires_grad_()
    with pytest.warns(UserWarning, match="gradients are recorded"):
        assert layer(given) == "original"
    assert agrees(layer, given_of(2)), "recorded, but of nothing here"
    assert layer.counts == {"cgdr_numba": 2, "original": 1}


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="one thread without JIT")
@torch.no_grad()
def test_small_steps_take_one_thread_and_large_ones_the_default() -> None:
    large = 2**21 // (4 * D * D) + 2
    for threads, batch, bins in ((None, 2, 1), (None, large // HV, 2), (2, 2, 2), (1, large // HV, 1)):
        layer = Layer(threads)
        for seed in range(2):
            given = given_of(seed, batch)
            layer(given)
            served = last_call()
            assert served is not None
            assert served.bins == bins


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="one thread without JIT")
@torch.no_grad()
def test_another_number_of_threads_is_noticed_at_a_prompt() -> None:
    layer, batch = Layer(), 2**21 // (4 * D * D * HV) + 1
    before = numba.get_num_threads()
    try:
        for threads in (1, 2, 1):
            numba.set_num_threads(threads)
            layer({**given_of(0, batch), "initial_state": None}, part="chunk")
            layer(given_of(1, batch))
            served = last_call()
            assert served is not None
            assert served.bins == threads
    finally:
        numba.set_num_threads(before)
