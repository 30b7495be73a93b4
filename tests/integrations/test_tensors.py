"""Torch tensors in and out of fla's functions: the same bits as NumPy arrays, no copies, and what is refused."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import (
    ContractError,
    DtypeError,
    RecurrentStep,
    UnsupportedError,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_gdn_gating,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from cgdr_numba.core import tensors

torch = pytest.importorskip("torch")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
B, T, HK, HV, DK, DV = 2, 5, 1, 2, 8, 6


def channel_major(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """A float32 tensor [B, T, H, D] with tokens next to one another, as transformers' convolution leaves it."""
    b, t, h, d = shape
    return torch.from_numpy(rng.standard_normal((b, h * d, t), np.float32)).transpose(1, 2).view(b, t, h, d)


def call_of(dtype: str, state_dtype: str = "float32") -> dict[str, Any]:
    """Tensors of a small call, channel-major where models have them so."""
    rng = np.random.default_rng(7)
    to = getattr(torch, dtype)
    return {
        "q": channel_major((B, T, HK, DK), rng).to(to),
        "k": channel_major((B, T, HK, DK), rng).to(to),
        "v": channel_major((B, T, HV, DV), rng).to(to),
        "g": torch.from_numpy(-rng.random((B, T, HV), np.float32)),
        "beta": torch.from_numpy(rng.random((B, T, HV), np.float32)).to(to),
        "initial_state": torch.from_numpy(rng.standard_normal((B, HV, DK, DV), np.float32)).to(
            getattr(torch, state_dtype)
        ),
    }


def as_numpy(tensor: Any) -> Any:
    """A NumPy copy of a tensor, in the same dtype."""
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.contiguous().numpy().copy()


both_functions = pytest.mark.parametrize(
    "function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule], ids=lambda function: function.__name__
)


@both_functions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_tensors_give_the_bits_of_arrays(function: Callable[..., Any], dtype: str, state_dtype: str) -> None:
    call = call_of(dtype, state_dtype)
    before = {name: x.clone() for name, x in call.items()}
    out, state = function(**call, output_final_state=True, use_qk_l2norm_in_kernel=True)
    arrays = {name: as_numpy(x) for name, x in call.items()}
    expected, expected_state = function(**arrays, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert type(out) is type(state) is torch.Tensor
    assert (out.dtype, state.dtype) == (getattr(torch, dtype), torch.float32)
    assert as_numpy(out).tobytes() == expected.tobytes()
    assert as_numpy(state).tobytes() == expected_state.tobytes()
    assert all(torch.equal(call[name], x) for name, x in before.items())


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_views_share_memory_both_ways(dtype: str) -> None:
    tensor = channel_major((B, T, HV, DV), np.random.default_rng(0)).to(getattr(torch, dtype))
    (array,) = tensors.as_arrays("op", x=tensor)
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    assert array.strides == tuple(tensor.element_size() * stride for stride in tensor.stride())
    back = tensors.as_tensor(array)
    assert (back.data_ptr(), back.dtype, back.stride()) == (tensor.data_ptr(), tensor.dtype, tensor.stride())


def test_packed_sequences_through_a_tensor_of_sums() -> None:
    call = call_of("float32")
    call = {name: x[:1] for name, x in call.items()} | {"initial_state": call["initial_state"]}
    for sums in (torch.tensor([0, 2, 5]), torch.tensor([0, 2, 5], dtype=torch.int32), [0, 2, 5]):
        out, state = chunk_gated_delta_rule(**call, cu_seqlens=sums, output_final_state=True)
        arrays = {name: as_numpy(x) for name, x in call.items()}
        expected = chunk_gated_delta_rule(**arrays, cu_seqlens=[0, 2, 5], output_final_state=True)
        assert np.array_equal(out.numpy(), expected[0])
        assert np.array_equal(state.numpy(), expected[1])


def test_raw_gates_and_gating() -> None:
    call, weights = call_of("bfloat16"), {"A_log": torch.zeros(HV), "dt_bias": torch.ones(HV)}
    out, _ = chunk_gated_delta_rule(**call, **weights, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    g, beta = fused_gdn_gating(weights["A_log"], call["g"], call["beta"], weights["dt_bias"])
    assert type(g) is type(beta) is torch.Tensor
    same, _ = chunk_gated_delta_rule(**{**call, "g": g, "beta": beta})
    assert torch.equal(out, same)


def test_out_state_is_written_in_place_and_returned() -> None:
    call = call_of("float32")
    expected = fused_recurrent_gated_delta_rule(**call, output_final_state=True)
    state = call["initial_state"]
    out, returned = fused_recurrent_gated_delta_rule(**call, out_state=state)
    assert returned is state
    assert torch.equal(state, expected[1])
    assert torch.equal(out, expected[0])
    with pytest.raises(ContractError, match="share no memory with inputs"):
        storage = torch.zeros(state.numel() + 1)
        views = {"initial_state": storage[:-1].view(state.shape), "out_state": storage[1:].view(state.shape)}
        fused_recurrent_gated_delta_rule(**call | views)


def test_a_prepared_step_takes_what_it_was_prepared_with() -> None:
    call = call_of("bfloat16")
    expected = fused_recurrent_gated_delta_rule(**call, output_final_state=True)
    arguments = list(call.values())
    step = RecurrentStep(*arguments)
    out = step(*arguments)
    assert torch.equal(out, expected[0])
    assert torch.equal(call["initial_state"], expected[1])
    with pytest.raises(
        DtypeError, match=r"`q` must be a torch.Tensor, as the first argument is one, got numpy.ndarray"
    ):
        step(as_numpy(call["q"]), *arguments[1:])


@both_functions
def test_tensors_beside_arrays(function: Callable[..., Any]) -> None:
    call = call_of("float32")
    for name in ("k", "g", "initial_state"):
        mixed = {**call, name: as_numpy(call[name])}
        with pytest.raises(DtypeError, match=f"`{name}` must be a torch.Tensor, as the first .* got numpy.ndarray"):
            function(**mixed)
        arrays = {key: as_numpy(x) for key, x in call.items()}
        with pytest.raises(DtypeError, match=f"`{name}` must be a NumPy array, got torch.Tensor: .* all of a call"):
            function(**{**arrays, name: call[name]})


@both_functions
def test_gradients_are_refused_where_they_are_recorded(function: Callable[..., Any]) -> None:
    call = call_of("float32")
    expected, _ = function(**call)
    call["k"].requires_grad_()
    with pytest.raises(UnsupportedError, match="`k` must not require grad, since no gradients are computed here"):
        function(**call)
    with torch.no_grad():
        assert torch.equal(function(**call)[0], expected)


@both_functions
def test_other_devices(function: Callable[..., Any]) -> None:
    call = call_of("float32") | {"v": torch.empty(B, T, HV, DV, device="meta")}
    with pytest.raises(UnsupportedError, match="`v` must be in the CPU's memory, got a tensor on meta"):
        function(**call)


def raw_call_of(function: Callable[..., Any], dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every tensor that a function takes, and the options that they ask for."""
    rng, is_kda = np.random.default_rng(9), function in (chunk_kda, fused_recurrent_kda)
    call = call_of(dtype) | {"A_log": torch.from_numpy(rng.standard_normal(HV, np.float32))}
    if is_kda:
        call["g"] = torch.from_numpy(rng.standard_normal((B, T, HV, DK), np.float32))
    call["dt_bias"] = torch.from_numpy(rng.standard_normal(HV * DK if is_kda else HV)).to(getattr(torch, dtype))
    if function is fused_recurrent_gated_delta_rule:
        call["gk"] = torch.from_numpy(-rng.random((B, T, HV, DK))).to(getattr(torch, dtype))
        call["gv"] = torch.from_numpy(-rng.random((B, T, HV, DV)))
    return call, {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "output_final_state": True}


every_function = pytest.mark.parametrize(
    "function",
    [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, chunk_kda, fused_recurrent_kda],
    ids=lambda function: function.__name__,
)


@every_function
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_is_taken_for_what_it_is(function: Callable[..., Any], dtype: str) -> None:
    call, options = raw_call_of(function, dtype)
    out, state = function(**call, **options)
    expected, expected_state = function(**{name: as_numpy(x) for name, x in call.items()}, **options)
    assert as_numpy(out).tobytes() == expected.tobytes()
    assert as_numpy(state).tobytes() == expected_state.tobytes()
    if "recurrent" in function.__name__:
        place = torch.full_like(state, torch.nan)
        again, moved = function(**call, **options | {"output_final_state": False}, out_state=place)
        assert moved is place
        assert torch.equal(again, out)
        assert torch.equal(moved, state)


@every_function
def test_every_tensor_is_refused_by_its_own_name(function: Callable[..., Any]) -> None:
    call, options = raw_call_of(function, "float32")
    if "recurrent" in function.__name__:
        call["out_state"] = torch.empty(B, HV, DK, DV)
    for name, tensor in call.items():
        with pytest.raises(UnsupportedError, match=f"^{function.__name__}: `{name}` must be in the CPU's memory"):
            function(**call | {name: tensor.to("meta")}, **options)
        if name != "q":
            with pytest.raises(
                DtypeError, match=f"^{function.__name__}: `{name}` must be a torch.Tensor, as the first"
            ):
                function(**call | {name: tensor.numpy()}, **options)


@both_functions
def test_tensors_without_plain_elements(function: Callable[..., Any]) -> None:
    call = call_of("float32")
    with pytest.raises(DtypeError, match="`beta` must be a tensor of plain numbers in memory"):
        function(**{**call, "beta": call["beta"].to_sparse()})


@both_functions
def test_other_dtypes(function: Callable[..., Any]) -> None:
    call = call_of("float32")
    with pytest.raises(DtypeError, match="`q` must be float16, bfloat16, float32 or float64, got int64"):
        function(**{**call, "q": call["q"].long()})
    with pytest.raises(DtypeError, match="`k` must have the dtype of `q`, float32, got bfloat16"):
        function(**{**call, "k": call["k"].bfloat16()})


def test_results_share_no_memory_with_inputs() -> None:
    call = call_of("float32")
    out, state = chunk_gated_delta_rule(**call, output_final_state=True)
    again, _ = chunk_gated_delta_rule(**call | {"initial_state": state}, output_final_state=True)
    pointers = {x.untyped_storage().data_ptr() for x in (out, state, again, *call.values())}
    assert len(pointers) == 3 + len(call)
