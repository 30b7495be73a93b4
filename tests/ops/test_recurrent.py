"""The recurrent function by itself: long decodes, states in place, splits, layouts, the cases of decode."""

import tracemalloc
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import ContractError, DtypeError, UnsupportedError, fused_recurrent_gated_delta_rule
from cgdr_numba.core.threads import most_threads
from conftest import COMPILED
from judge import assert_same_bits, assert_within, run_fla, same_bits
from reference import Case, Result, make_case, part, rr_out, rr_state, token_loop

BACKENDS = ["fast", "golden"]


def run(case: Case, backend: str = "fast", **options: Any) -> Result:
    """The case through the recurrent function."""
    out, state = fused_recurrent_gated_delta_rule(
        case.q,
        case.k,
        case.v,
        g=case.g,
        beta=case.beta,
        scale=case.scale,
        initial_state=case.state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.l2norm,
        cu_seqlens=case.cu,
        backend=backend,
        **options,
    )
    assert state is not None
    return Result(out, state)


def mild(seed: int, t: int, width: int = 32, **options: Any) -> Case:
    """A case whose gates forget slowly, so that errors add up."""
    g = np.random.default_rng(seed).uniform(-1e-3, 0, (1, t, 1))
    return make_case(seed, t=t, dims=(width, width), g=g, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_t013_beta_in_float32_keeps_long_runs_exact(backend: str) -> None:
    case = mild(13, 4096)
    raw = np.random.default_rng(13).standard_normal(case.beta.shape).astype(ml_dtypes.bfloat16).astype(np.float64)
    exact = case.but(beta=1 / (1 + np.exp(-raw)))
    actual = run(exact.but(beta=exact.beta.astype(np.float32)), backend)
    assert rr_state(actual.state, token_loop(exact).state).rr <= 1e-5
    rounded = run(exact.but(beta=exact.beta.astype(ml_dtypes.bfloat16)), backend)
    assert rr_state(rounded.state, token_loop(exact).state).rr > 1e-4, "a rounded beta would show"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_t017_state_stays_float32_through_4096_decode_calls(dtype: Any) -> None:
    case = mild(17, 4096)
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    state = np.ascontiguousarray(half.state)
    for t in range(4096):
        run(part(half, t, t + 1, state), out_state=state)
    assert rr_state(state, token_loop(half).state).rr <= 1e-5


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_t020_states_beyond_half_precision(backend: str, dtype: Any) -> None:
    case = make_case(20, t=64, beta=0.0, g=np.array([-4.0] + [0.0] * 63)[None, :, None])
    state = case.state.copy()
    state[0, 0, 0, 0] = 65536
    q, k, v = (x.astype(dtype) for x in (case.q, case.k, case.v))
    out, final = run(case.but(q=q, k=k, v=v, state=state), backend)
    assert np.isfinite(out.astype(np.float32)).all()
    assert final[0, 0, 0, 0] == pytest.approx(65536 * np.exp(-4.0), rel=2e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(32, 32), (32, 48), (48, 32)])
def test_t049_layouts_agree_and_wrong_ones_are_refused(backend: str, dims: tuple[int, int]) -> None:
    case = make_case(49, t=66, heads=(1, 2), dims=dims)
    k_first = run(case, backend)
    v_first = run(case.but(state=np.ascontiguousarray(case.state.swapaxes(2, 3))), backend, state_v_first=True)
    assert_within(case, Result(v_first.out, v_first.state.swapaxes(2, 3)), out=1e-6, state=1e-6, expected=k_first)
    first = run(part(case, 0, 65, case.state), backend)
    second = run(part(case, 65, 66, first.state), backend)
    assert rr_out(part(case, 65, 66, None), second.out, k_first.out[:, 65:]).rr <= 1e-6
    if dims[0] != dims[1]:
        with pytest.raises(ContractError, match=r"`initial_state` must be \[N, Hv, Dv, Dk\]"):
            run(case, backend, state_v_first=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_t067_several_tokens_continue_from_a_state(backend: str) -> None:
    case = make_case(67, t=16, heads=(2, 4), dims=(32, 48))
    whole, one = run(case, backend), run(part(case, 0, 1, case.state), backend)
    assert rr_out(part(case, 0, 1, None), whole.out[:, :1], one.out).rr <= 1e-6


@pytest.mark.skipif(not COMPILED, reason="plain NumPy makes arrays of its own")
def test_t128_decode_in_place_allocates_no_state() -> None:
    case = make_case(128, t=1, heads=(16, 32), dims=(128, 128))
    state = case.state.copy()
    run(case.but(state=state), out_state=state, threads=1)
    address = state.__array_interface__["data"][0]
    tracemalloc.start()
    try:
        result = run(case.but(state=state), out_state=state, threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.state is state
    assert state.__array_interface__["data"][0] == address
    assert peak < state.nbytes // 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_t131_subnormal_states_are_kept(backend: str) -> None:
    case = make_case(131, t=1, beta=0.0, g=0.0)
    tiny = np.full_like(case.state, 1e-39)
    out, state = run(case.but(state=tiny, v=np.zeros_like(case.v)), backend)
    assert same_bits(state, tiny)
    assert np.abs(out - token_loop(case.but(state=tiny)).out).max() <= 1e-38


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_splits_at_any_token_change_no_bit(state_v_first: bool, dtype: Any) -> None:
    case = make_case(1, t=131, heads=(2, 4), dims=(37, 21))
    if state_v_first:
        case = case.but(state=np.ascontiguousarray(case.state.swapaxes(2, 3)))
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    whole = run(half, state_v_first=state_v_first)
    for cuts in ([1], [64], [63, 65], [1, 2, 3, 100], list(range(1, 131, 7))):
        outs, state = [], half.state
        for begin, end in pairwise([0, *cuts, 131]):
            piece = run(part(half, begin, end, state), state_v_first=state_v_first)
            outs.append(piece.out)
            state = piece.state
        assert_same_bits(Result(np.concatenate(outs, axis=1), state), whole)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_bits_do_not_depend_on_threads_mates_strides_or_alignment(state_v_first: bool) -> None:
    case = make_case(2, t=9, heads=(2, 6), dims=(40, 24), batch=3)
    if state_v_first:
        case = case.but(state=np.ascontiguousarray(case.state.swapaxes(2, 3)))
    options = {"state_v_first": state_v_first}
    whole = run(case, **options)
    for threads in sorted({1, most_threads()}):
        assert_same_bits(run(case, threads=threads, **options), whole)
    for row in range(3):
        alone = run(
            case.but(**{name: getattr(case, name)[row : row + 1] for name in ("q", "k", "v", "g", "beta", "state")}),
            **options,
        )
        assert_same_bits(alone, Result(whole.out[row : row + 1], whole.state[row : row + 1]))
    few = case.but(
        **{name: getattr(case, name)[:, :, :1] for name in ("q", "k")},
        **{name: getattr(case, name)[:, :, :3] for name in ("v", "g", "beta")},
        state=case.state[:, :3],
    )
    assert_same_bits(run(few, **options), Result(whole.out[:, :, :3], whole.state[:, :3]))
    turned = case.but(
        **{name: np.asfortranarray(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "state")}
    )
    assert_same_bits(run(turned, **options), whole)
    odd = np.frombuffer(b"x" + case.state.tobytes(), np.uint8)[1:].view(np.float32).reshape(case.state.shape)
    assert_same_bits(run(case.but(state=odd), **options), whole)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_states_of_other_dtypes_are_read_and_float32_comes_back(dtype: Any) -> None:
    case = make_case(3, t=5, heads=(1, 2), dims=(24, 40))
    other = case.but(state=case.state.astype(dtype))
    actual = run(other)
    assert actual.state.dtype == np.float32
    assert_same_bits(actual, run(other.but(state=other.state.astype(np.float32))))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_accuracy_is_that_of_float32_and_of_rounding_the_output(dtype: Any) -> None:
    case = make_case(4, t=200, heads=(2, 4), dims=(128, 128)).but(l2norm=True)
    half = case.but(**{name: getattr(case, name).astype(dtype) for name in ("q", "k", "v")})
    expected = token_loop(half)
    floor = rr_out(half, expected.out.astype(dtype), expected.out).rr
    actual = run(half)
    assert rr_out(half, actual.out, expected.out).rr <= max(1e-6, 1.1 * floor)
    assert rr_state(actual.state, expected.state).rr <= 1e-6


def test_out_state_may_be_the_initial_state_and_nothing_else() -> None:
    case = make_case(5, t=3, heads=(1, 2), dims=(16, 16))
    expected = run(case)
    before = case.state.copy()
    other = np.full_like(before, np.nan)
    assert_same_bits(run(case, out_state=other), expected)
    assert same_bits(case.state, before)
    buffer = np.zeros((3, *before.shape[1:]), np.float32)
    for name, changes, out_state, message in (
        (
            "shifted",
            {"state": buffer[:1]},
            buffer.reshape(-1)[8 : 8 + before.size].reshape(before.shape),
            "initial_state",
        ),
        ("v", {"v": buffer.reshape(-1)[: case.v.size].reshape(case.v.shape)}, buffer[:1], "`v`"),
    ):
        with pytest.raises(ContractError, match=rf"`out_state` must .*{message}"):
            run(case.but(**changes), out_state=out_state)
        assert name
    run(case, out_state=case.state)
    assert same_bits(case.state, expected.state)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: s[:, :1], ContractError, r"`out_state` must be \[N, Hv, Dk, Dv\] = \[1, 2, 16, 16\], got"),
        (lambda s: s.astype(np.float64), DtypeError, r"`out_state` must be float32, got float64"),
        (lambda s: s.tolist(), DtypeError, r"`out_state` must be a NumPy array"),
        (lambda s: s.swapaxes(2, 3), ContractError, r"`out_state` must have adjacent elements .* got a stride of 64"),
        (lambda s: np.broadcast_to(s, s.shape), ContractError, r"`out_state` must be writable"),
    ],
)
def test_out_state_is_checked(make: Any, error: Any, message: str) -> None:
    case = make_case(6, t=3, heads=(1, 2), dims=(16, 16))
    with pytest.raises(error, match=message):
        run(case, out_state=make(np.zeros_like(case.state)))


def test_options_of_the_recurrent_function() -> None:
    case = make_case(7, t=2)
    with pytest.raises(UnsupportedError, match='backend="faithful" is not offered'):
        run(case, "faithful")
    with pytest.raises(ContractError, match="`out_state` must be left out"):
        run(case, "golden", out_state=case.state)
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        run(case, head_first=True)
    for name in ("gk", "gv"):
        with pytest.raises(ContractError, match=rf"`{name}` must be \[B, T, Hv, D[kv]\] \(4 axes\), got 3 axes"):
            run(case, **{name: case.g})
    with pytest.raises(DtypeError, match="float64 q, k and v are golden's only"):
        run(case.cast(np.float64))
    out, state = fused_recurrent_gated_delta_rule(case.q, case.k, case.v)
    assert state is None
    zeros, ones = np.zeros_like(case.g), np.ones_like(case.beta)
    assert same_bits(out, run(case.but(g=zeros, beta=ones, state=None)).out)


def test_recurrent_and_chunked_golden_are_one(chunk_backend: str) -> None:
    case = make_case(8, t=70, heads=(1, 2))
    if chunk_backend == "golden":
        assert_same_bits(run(case, "golden"), run_fla(case, "golden"))
    else:
        assert_within(case, run(case), out=1e-5, state=1e-5, expected=run_fla(case, chunk_backend))
