"""Every line of the contract, broken on purpose: the message names the argument, the rule and what came."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba import (
    ContractError,
    DtypeError,
    chunk_gated_delta_rule,
    host,
    npu_chunk_gated_delta_rule,
    plan_chunk,
)
from cgdr_numba.core.dims import Dims

T, HK, HV, DK, DV = 5, 2, 4, 3, 6


def fla_call(**changes: Any) -> dict[str, Any]:
    """A sound call of the fla family with some arguments replaced; B = 1, two sequences."""
    rng = np.random.default_rng(0)
    call: dict[str, Any] = {
        "q": rng.standard_normal((1, T, HK, DK)),
        "k": rng.standard_normal((1, T, HK, DK)),
        "v": rng.standard_normal((1, T, HV, DV)),
        "g": -rng.random((1, T, HV)),
        "beta": rng.random((1, T, HV)),
        "initial_state": rng.standard_normal((2, HV, DK, DV)),
        "cu_seqlens": [0, 2, T],
    }
    call = {name: x.astype(np.float32) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    return {**call, "backend": "golden", **changes}


def cann_call(**changes: Any) -> dict[str, Any]:
    """A sound call of the CANN family with some arguments replaced; lengths 2 and 3."""
    fla = fla_call()
    call = {name: fla[ours][0] for name, ours in (("query", "q"), ("key", "k"), ("value", "v"), ("g", "g"))}
    call |= {"beta": fla["beta"][0], "initial_state": fla["initial_state"].swapaxes(2, 3), "actual_seq_lengths": [2, 3]}
    return {**call, "backend": "golden", **changes}


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


FLA_SHAPES = [
    ({"q": ones(T, HK, DK)}, r"`q` must be \[B, T, Hk, Dk\] \(4 axes\), got 3 axes: \[5, 2, 3\]"),
    ({"k": ones(1, T, HK, DK, 1)}, r"`k` must be \[B, T, Hk, Dk\] \(4 axes\), got 5 axes"),
    ({"k": ones(1, T, HK, DK + 1)}, r"`k` must be \[B, T, Hk, Dk\] = \[1, 5, 2, 3\], got \[1, 5, 2, 4\]"),
    ({"k": ones(1, T + 1, HK, DK)}, r"`k` must be .* got \[1, 6, 2, 3\]"),
    ({"v": ones(1, T + 1, HV, DV)}, r"`v` must be \[B, T, Hv, Dv\] = \[1, 5, 4, 6\], got \[1, 6, 4, 6\]"),
    ({"v": ones(1, T, 3, DV)}, r"`v` must have .* a multiple of Hk = 2 .* got Hv = 3"),
    ({"v": ones(1, T, 1, DV)}, r"`v` must have .* a multiple of Hk = 2 .* got Hv = 1"),
    ({"v": ones(1, T, 0, DV)}, r"got Hv = 0"),
    ({"v": ones(1, T, HV, 0)}, r"got Hv = 4, Dv = 0"),
    ({"q": ones(1, T, HK, 0), "k": ones(1, T, HK, 0)}, r"`q` must have Hk and Dk of at least 1, got Hk = 2, Dk = 0"),
    ({"q": ones(1, T, 0, DK), "k": ones(1, T, 0, DK)}, r"`q` must have Hk and Dk of at least 1, got Hk = 0"),
    ({"g": ones(1, T, HK)}, r"`g` must be \[B, T, Hv\] = \[1, 5, 4\], got \[1, 5, 2\]"),
    ({"g": ones(1, T, HV, 1)}, r"`g` must be \[B, T, Hv\] \(3 axes\), got 4 axes"),
    ({"beta": ones(1, T, 1)}, r"`beta` must be \[B, T, Hv\] = \[1, 5, 4\], got \[1, 5, 1\]"),
    (
        {"initial_state": ones(2, HV, DV, DK)},
        r"`initial_state` must be \[N, Hv, Dk, Dv\] = \[2, 4, 3, 6\], got .*6, 3\]",
    ),
    ({"initial_state": ones(1, HV, DK, DV)}, r"`initial_state` must be .* = \[2, 4, 3, 6\], got \[1, 4, 3, 6\]"),
    ({"initial_state": ones(HV, DK, DV)}, r"`initial_state` must be \[N, Hv, Dk, Dv\] \(4 axes\), got 3 axes"),
    ({"state_v_first": True}, r"`initial_state` must be \[N, Hv, Dv, Dk\] = \[2, 4, 6, 3\], got \[2, 4, 3, 6\]"),
]
LENGTHS = [
    ([], r"`cu_seqlens` must be \[N \+ 1\] sums .* end at T = 5, got \[\]"),
    ([1, 5], r"got \[1, 5\]"),
    ([0, 4], r"got \[0, 4\]"),
    ([0, 4, 2, 5], r"got \[0, 4, 2, 5\]"),
    ([0, -1, 5], r"got \[0, -1, 5\]"),
    ([0, 2**63], r"`cu_seqlens` must fit in int64, got 9223372036854775808"),
    ([0, -(2**70)], r"`cu_seqlens` must fit in int64, got -1180591620717411303424"),
    (np.array([[0, 5]]), r"`cu_seqlens` must have one axis, got 2 axes: \[1, 2\]"),
    (np.array([0, 2**64 - 1], np.uint64), r"`cu_seqlens` must fit in int64, got 18446744073709551615"),
    (list(range(6)) + [5] * 20 + [6], r"got \[0, 1, 2, 3, 4, 5, \.\.\., 5, 5, 5, 5, 6\] \(27 values\)"),
]
DTYPES = [
    ({"q": [[1.0]]}, r"`q` must be a NumPy array, got builtins.list"),
    ({"v": None}, r"`v` must be a NumPy array, got builtins.NoneType"),
    ({"k": np.ma.masked_array(ones(1, T, HK, DK))}, r"`k` must be a NumPy array without a mask"),
    ({"g": ones(1, T, HV, dtype=">f4")}, r"`g` must be in native byte order, got dtype >f4"),
    ({"q": ones(1, T, HK, DK, dtype=np.int32)}, r"`q` must be float16, bfloat16, float32 or float64, got int32"),
    ({"beta": ones(1, T, HV, dtype=bool)}, r"`beta` must be float16, .* got bool"),
    ({"initial_state": ones(2, HV, DK, DV, dtype=object)}, r"`initial_state` must be float16, .* got object"),
    ({"g": ones(1, T, HV, dtype=np.complex64)}, r"`g` must be float16, .* got complex64"),
    ({"g": ones(1, T, HV, dtype=np.longdouble)}, r"`g` must be float16, .* got float128"),
    ({"k": ones(1, T, HK, DK, dtype=np.float16)}, r"`k` must have the dtype of `q`, float32, got float16"),
    ({"v": ones(1, T, HV, DV, dtype=np.float64)}, r"`v` must have the dtype of `q`, float32, got float64"),
    ({"cu_seqlens": np.array([0.0, 5.0])}, r"`cu_seqlens` must hold integers, got float64"),
    ({"cu_seqlens": [False, True]}, r"`cu_seqlens` must hold integers, got False"),
    ({"cu_seqlens": [[0, 1], [3]]}, r"`cu_seqlens` must hold integers, got \[0, 1\]"),
    ({"cu_seqlens": [0, 5.0]}, r"`cu_seqlens` must hold integers, got 5.0"),
    ({"cu_seqlens": np.array([False, True])}, r"`cu_seqlens` must hold integers, got bool"),
    ({"cu_seqlens": 5}, r"`cu_seqlens` must be a vector of integers, got builtins.int"),
    ({"scale": "1"}, r"`scale` must be a real number or None, got '1'"),
    ({"scale": True}, r"`scale` must be a real number or None, got True"),
    ({"output_final_state": 1}, r"`output_final_state` must be True or False, got 1"),
    ({"state_v_first": None}, r"`state_v_first` must be True or False, got None"),
    ({"use_qk_l2norm_in_kernel": "yes"}, r"`use_qk_l2norm_in_kernel` must be True or False, got 'yes'"),
    ({"threads": 1.0}, r"`threads` must be an integer or None, got 1.0"),
    ({"threads": True}, r"`threads` must be an integer or None, got True"),
    ({"backend": "faithful", "plan": 3}, r"`plan` must be a Plan or None, got int"),
    ({"backend": "fast", "plan": 3}, r"`plan` must be a HostPlan or None, got int"),
]
OPTIONS = [
    ({"backend": "gold"}, r"""`backend` must be "fast" or "golden" or "faithful", got 'gold'"""),
    ({"backend": None}, r"`backend` must be .* got None"),
    ({"backend": "faithful", "axpy": "fma"}, r"""`axpy` must be "two-roundings" or "fused", got 'fma'"""),
    ({"backend": "faithful", "overflow": True}, r"""`overflow` must be "ieee" or "saturate", got True"""),
    ({"threads": 0}, r"`threads` must be from 1 to numba's \d+ threads, got 0"),
    ({"threads": 10**6}, r"`threads` must be from 1 to numba's \d+ threads, got 1000000"),
    ({"target": "310p"}, r"""`target` must be left out with backend="golden" """[:-1]),
    ({"overflow": "saturate"}, r"`overflow` must be left out"),
    ({"axpy": "fused"}, r"`axpy` must be left out"),
    ({"plan": plan_chunk(Dims(5, 1, 1, 1, 8, 8), [5])}, r"`plan` must be left out"),
    ({"backend": "fast", "axpy": "fused"}, r"""`axpy` must be left out with backend="fast", which has no options of"""),
    ({"backend": "fast", "overflow": "saturate"}, r"`overflow` must be left out .* got 'saturate'"),
    ({"backend": "fast", "target": "910b"}, r"""`target` must be "310p", "host" .* got '910b' \(the 910B's"""),
    ({"backend": "faithful", "target": "910b"}, r"""`target` must be "310p", "host" .* got '910b' \(the 910B's"""),
]


@pytest.mark.parametrize(("changes", "message"), FLA_SHAPES)
def test_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match="^chunk_gated_delta_rule: .*" + message) as caught:
        chunk_gated_delta_rule(**fla_call(**changes))
    assert not isinstance(caught.value, DtypeError)


@pytest.mark.parametrize(("cu_seqlens", "message"), LENGTHS)
def test_cumulative_lengths(cu_seqlens: Any, message: str) -> None:
    with pytest.raises(ContractError, match="^chunk_gated_delta_rule: .*" + message):
        chunk_gated_delta_rule(**fla_call(cu_seqlens=cu_seqlens, initial_state=None))


@pytest.mark.parametrize(("changes", "message"), DTYPES)
def test_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtypeError, match="^chunk_gated_delta_rule: .*" + message) as caught:
        chunk_gated_delta_rule(**fla_call(**changes))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(("changes", "message"), OPTIONS)
def test_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match="^chunk_gated_delta_rule: " + message):
        chunk_gated_delta_rule(**fla_call(**changes))


def test_sequences_need_a_single_batch_row() -> None:
    call = {name: np.concatenate([fla_call()[name]] * 2) for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ContractError, match=r"`q` must have B = 1 where `cu_seqlens` is given, got B = 2"):
        chunk_gated_delta_rule(**fla_call(**call))


CANN = [
    ({"query": ones(1, T, HK, DK)}, r"`query` must be \[T, Hk, Dk\] \(3 axes\), got 4 axes"),
    ({"key": ones(T, HK, DK + 1)}, r"`key` must be \[T, Hk, Dk\] = \[5, 2, 3\], got \[5, 2, 4\]"),
    ({"value": ones(T, 3, DV)}, r"`value` must have .* \(the heads of `query`\), got Hv = 3"),
    ({"g": ones(T, HK)}, r"`g` must be \[T, Hv\] = \[5, 4\], got \[5, 2\]"),
    ({"beta": None}, r"`beta` must be a NumPy array, got builtins.NoneType"),
    ({"initial_state": None}, r"`initial_state` must be a NumPy array, got"),
    ({"initial_state": ones(2, HV, DK, DV)}, r"`initial_state` must be \[N, Hv, Dv, Dk\] = \[2, 4, 6, 3\], got"),
    ({"actual_seq_lengths": [2, 2]}, r"`actual_seq_lengths` must be .* the sum T = 5, got \[2, 2\] with the sum 4"),
    ({"actual_seq_lengths": [7, -2]}, r"lengths of at least 0 .* got \[7, -2\] with the sum 5"),
    ({"actual_seq_lengths": [5]}, r"`initial_state` must be .* = \[1, 4, 6, 3\], got \[2, 4, 6, 3\]"),
    ({"actual_seq_lengths": [2**62, 2**62, 2**62, 2**62, 5]}, r"with the sum 18446744073709551621"),
    ({"actual_seq_lengths": None}, r"`actual_seq_lengths` must be a vector of integers, got builtins.NoneType"),
]


@pytest.mark.parametrize(("changes", "message"), CANN)
def test_cann_family(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match="^npu_chunk_gated_delta_rule: .*" + message):
        npu_chunk_gated_delta_rule(**cann_call(**changes))


def test_order_of_checks_is_type_rank_shape_dtype_lengths() -> None:
    with pytest.raises(DtypeError, match="`beta` must be a NumPy array"):
        chunk_gated_delta_rule(**fla_call(beta=1.0, q=ones(2)))
    with pytest.raises(ContractError, match=r"`v` must be .*axes"):
        chunk_gated_delta_rule(**fla_call(v=ones(2), k=ones(1, 1, 1, 1)))
    with pytest.raises(ContractError, match=r"`k` must be .* got"):
        chunk_gated_delta_rule(**fla_call(k=ones(1, 1, 1, 1), g=ones(1, T, HV, dtype=np.int8)))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("head_first", r"known to fla: tensors are \[B, T, H, D\]"),
        ("chunk_size", "known to fla: the chunk is 64"),
        ("transpose_state_layout", "known to fla: .*state_v_first"),
        ("cp_context", "known to fla"),
        ("sclae", "unexpected keyword argument 'sclae'$"),
    ],
)
def test_unknown_keywords_are_type_errors(name: str, part: str) -> None:
    with pytest.raises(TypeError, match=rf"chunk_gated_delta_rule\(\) .*{part}"):
        chunk_gated_delta_rule(**fla_call(**{name: 64}))
    with pytest.raises(TypeError, match=name):
        npu_chunk_gated_delta_rule(**cann_call(**{name: 64}))


@pytest.mark.parametrize(
    ("operator", "call", "default", "others"),
    [
        (chunk_gated_delta_rule, fla_call, "fast", ("golden", "faithful")),
        (npu_chunk_gated_delta_rule, cann_call, "faithful", ("fast", "golden")),
    ],
)
def test_every_family_has_a_default_backend(operator: Any, call: Any, default: str, others: tuple[str, ...]) -> None:
    """Told apart by its bits, which differ from those of all other backends."""
    arguments = call()
    del arguments["backend"]
    out = operator(**arguments)[0]
    assert np.array_equal(out, operator(**call(backend=default))[0])
    for other in others:
        assert not np.array_equal(out, operator(**call(backend=other))[0])


@pytest.mark.parametrize("backend", ["fast", "faithful"])
def test_float64_is_goldens_and_the_message_says_how_to_cast(backend: str) -> None:
    call = fla_call()
    wide = {name: call[name].astype(np.float64) for name in ("q", "k", "v")}
    with pytest.raises(DtypeError, match=r"float64 q, k and v are golden's only.*q\.astype\(np\.float32\)"):
        chunk_gated_delta_rule(**fla_call(**wide, backend=backend))


def test_plan_must_match_and_excludes_target_and_threads() -> None:
    dims = Dims(T, 2, HK, HV, DK, DV)
    plan = plan_chunk(dims, [2, 3], dtype="float32")
    chunk_gated_delta_rule(**fla_call(backend="faithful", plan=plan))
    for other in (
        plan_chunk(dims, [3, 2], dtype="float32"),
        plan_chunk(dims, [2, 3], dtype="float16"),
        plan_chunk(dims._replace(dv=7), [2, 3], dtype="float32"),
    ):
        with pytest.raises(ContractError, match=r"`plan` must be made for PlanKey.*got one for PlanKey"):
            chunk_gated_delta_rule(**fla_call(backend="faithful", plan=other))
    host_plan = plan_chunk(dims, [2, 3], backend="fast")
    for name, value in (("target", host()), ("threads", 1)):
        for backend, made in (("faithful", plan), ("fast", host_plan)):
            with pytest.raises(ContractError, match=f"`plan` excludes `{name}`, got {name} = "):
                chunk_gated_delta_rule(**fla_call(backend=backend, plan=made, **{name: value}))


@pytest.mark.parametrize("scale", [2, 1e300, np.float32(0.5), np.float64(0.25), np.int64(3), float("nan")])
def test_any_real_scale_is_taken(scale: Any) -> None:
    out, _ = chunk_gated_delta_rule(**fla_call(scale=scale))
    one, _ = chunk_gated_delta_rule(**fla_call(scale=1.0))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, one * np.float32(scale), rtol=1e-6)


def test_a_scale_beyond_float32_is_infinite_in_faithful() -> None:
    out, _ = chunk_gated_delta_rule(**fla_call(scale=1e300, backend="faithful"))
    assert not np.isfinite(out).any()


def test_value_domains_are_never_errors(chunk_backend: str) -> None:
    call = fla_call(backend=chunk_backend)
    for name, value in (("g", 500.0), ("g", np.nan), ("g", -np.inf), ("beta", -3.0), ("beta", np.inf), ("q", 1e30)):
        chunk_gated_delta_rule(**{**call, name: np.full_like(call[name], value)})
