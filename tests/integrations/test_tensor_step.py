"""Prepared steps on torch tensors: the function's bits by address, and what goes another way."""

import gc
import weakref
from typing import Any

import numba
import pytest

from cgdr_numba import (
    ContractError,
    DtypeError,
    RecurrentStep,
    UnsupportedError,
    fused_recurrent_gated_delta_rule,
    last_call,
)

torch = pytest.importorskip("torch")

COMPILED = not numba.config.DISABLE_JIT
B, T, HK, HV, DK, DV = 2, 2, 1, 2, 8, 6


def tensors_of(seed: int, dtype: Any = torch.float32, batch: int = B) -> list[Any]:
    """q, k, v as views of one buffer, gates and a state."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(batch, T, 2 * HK * DK + HV * DV, generator=generator).to(dtype)
    q, k, v = mixed.split([HK * DK, HK * DK, HV * DV], dim=-1)
    gates = torch.rand(batch, T, HV, generator=generator)
    state = torch.randn(batch, HV, DK, DV, generator=generator)
    return [
        q.unflatten(2, (HK, DK)),
        k.unflatten(2, (HK, DK)),
        v.unflatten(2, (HV, DV)),
        -gates,
        gates.to(dtype),
        state,
    ]


def expected_of(tensors: list[Any]) -> tuple[Any, Any]:
    q, k, v, g, beta, state = (x.clone() for x in tensors)
    out, final = fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out, final


def agrees(step: RecurrentStep, tensors: list[Any]) -> bool:
    """Whether a call has the function's bits in its result and in the state that it moves on."""
    out, final = expected_of(tensors)
    result = step(*tensors)
    return type(result) is torch.Tensor and torch.equal(result, out) and torch.equal(tensors[5], final)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_steps_have_the_bits_of_the_function(dtype: Any, threads: int) -> None:
    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("one core")
    step = RecurrentStep(*tensors_of(0, dtype), use_qk_l2norm_in_kernel=True, threads=threads)
    for seed in range(4):
        assert agrees(step, tensors_of(seed, dtype))
    served = last_call()
    assert served is not None
    assert (served.backend, served.worker, served.bins) == ("fast", "steps", threads)


def test_other_strides_and_kinds_of_tensors_have_the_same_bits() -> None:
    step = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True)
    alike = step.run_alike
    assert (alike is not None) == COMPILED
    for change in (
        lambda x: x.contiguous(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: x.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.imag(torch.complex(torch.zeros_like(x), -x).conj()),
    ):
        for place in range(5):
            tensors = tensors_of(1)
            tensors[place] = change(tensors[place])
            if tensors[place].is_neg():
                assert alike is None or alike(*tensors) is None
                with pytest.raises(DtypeError, match="negative bit"):
                    step(*tensors)
                tensors[place] = tensors[place].resolve_neg()
            assert agrees(step, tensors)


def test_a_state_with_rows_apart_is_refused_as_without_addresses() -> None:
    step = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True)
    tensors = tensors_of(1)
    tensors[5] = tensors[5].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ContractError, match="`state` must have"):
        step(*tensors)
    padded = torch.zeros(B, HV, DK, DV + 2)
    padded[..., :DV] = tensors[5]
    tensors[5] = padded[..., :DV]
    assert agrees(step, tensors)


def test_shapes_dtypes_and_places_are_those_of_the_start() -> None:
    step = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True)
    for place, name in enumerate(("q", "k", "v", "g", "beta", "state")):
        for change in (lambda x: x[:1], lambda x: x.double()):
            tensors = tensors_of(1)
            before = tensors[5].clone()
            tensors[place] = change(tensors[place])
            with pytest.raises(ContractError, match=f"`{name}` must be as prepared"):
                step(*tensors)
            assert torch.equal(tensors[5], before) or place == 5
        tensors = tensors_of(1)
        tensors[place] = tensors[place].to("meta")
        with pytest.raises(UnsupportedError, match=f"`{name}` must be in the CPU's memory"):
            step(*tensors)
        tensors[place] = torch.zeros(tensors[place].shape).to_sparse()
        with pytest.raises(DtypeError, match=f"`{name}` must be a tensor of plain numbers"):
            step(*tensors)
        tensors[place] = tensors_of(1)[place].numpy()
        with pytest.raises(DtypeError, match=f"`{name}` must be a torch.Tensor"):
            step(*tensors)


def test_gradients_are_refused_where_they_are_recorded() -> None:
    step = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True)
    tensors = tensors_of(1)
    tensors[0].requires_grad_()
    with pytest.raises(UnsupportedError, match="`q` must not require grad"):
        step(*tensors)
    with torch.no_grad():
        assert agrees(step, tensors)
    with torch.inference_mode():
        assert agrees(step, tensors_of(2))


def test_a_step_holds_on_to_no_tensor() -> None:
    tensors = tensors_of(0)
    step = RecurrentStep(*tensors, use_qk_l2norm_in_kernel=True)
    step(*tensors)
    watched = [weakref.ref(x.untyped_storage()) for x in tensors if x is not None]
    places = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert all(x() is None for x in (*watched, *places))
    assert agrees(step, tensors_of(1))


def test_no_sequences_are_no_work() -> None:
    tensors = tensors_of(0, batch=0)
    assert agrees(RecurrentStep(*tensors, use_qk_l2norm_in_kernel=True), tensors)


@pytest.mark.skipif(not COMPILED, reason="addresses are for compiled code")
@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_step_hands_out_outlives_it(threads: int) -> None:
    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("one core")
    alike = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True, threads=threads).run_alike
    gc.collect()
    _litter = [RecurrentStep(*tensors_of(seed)) for seed in range(50)]
    assert alike is not None
    tensors = tensors_of(1)
    out, final = expected_of(tensors)
    assert torch.equal(alike(*tensors), out)
    assert torch.equal(tensors[5], final)


@pytest.mark.skipif(not COMPILED, reason="addresses are for compiled code")
def test_the_usual_call_takes_addresses() -> None:
    step = RecurrentStep(*tensors_of(0), use_qk_l2norm_in_kernel=True)
    assert step.run_alike is not None
    tensors = tensors_of(1)
    out, final = expected_of(tensors)
    assert torch.equal(step.run_alike(*tensors), out)
    assert torch.equal(tensors[5], final)
