"""What calls mean and which are refused: heads, axis order, state layout, lengths, dtypes of arguments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import chunk_gated_delta_rule, npu_chunk_gated_delta_rule
from cgdr_numba.core import memory
from cgdr_numba.core.ragged import packed
from judge import assert_same_bits, assert_within, both_families, run_cann, run_fla
from reference import Array, Case, make_case

bf16 = ml_dtypes.bfloat16


@pytest.fixture
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result and no scratch may be allocated, so nothing can have been computed."""

    def refuse(shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError(f"allocated {shape} of {dtype} before the contract was checked")

    monkeypatch.setattr(memory, "empty", refuse)


def heads_of(x: Array, n: int) -> Array:
    """The same numbers with n heads, repeated or cut."""
    return np.resize(x, (*x.shape[:2], n, *x.shape[3:]))


def with_heads(case: Case, **heads: int) -> Case:
    """The case with another number of heads in the tensors named."""
    return case.but(**{name: heads_of(getattr(case, name), n) for name, n in heads.items()})


HEAD_FAULTS = {
    "3 value heads on 2": ({"v": 3, "g": 3, "beta": 3}, r"`v(alue)?` must have .* a multiple of Hk = 2 .* got Hv = 3"),
    "fewer value heads": ({"v": 1, "g": 1, "beta": 1}, r"`v(alue)?` must have .* a multiple of Hk = 2 .* got Hv = 1"),
    "no value heads": ({"v": 0, "g": 0, "beta": 0}, r"`v(alue)?` must have .* a multiple of Hk = 2 .* got Hv = 0"),
    "more key than query heads": (
        {"k": 4},
        r"`k(ey)?` must be \[(B, )?T, Hk, Dk\] = \[(1, )?5, 2, 16\], got .*5, 4, 16",
    ),
    "g per key head": ({"g": 2}, r"`g` must be \[(B, )?T, Hv\] = \[(1, )?5, 4\], got \[(1, )?5, 2\]"),
    "beta per key head": ({"beta": 2}, r"`beta` must be \[(B, )?T, Hv\] = \[(1, )?5, 4\], got \[(1, )?5, 2\]"),
    "one gate for all": ({"g": 1}, r"`g` must be \[(B, )?T, Hv\] = \[(1, )?5, 4\], got \[(1, )?5, 1\]"),
}


@both_families
@pytest.mark.parametrize("fault", HEAD_FAULTS)
def test_t046_head_counts_that_do_not_fit(backend: str, run: Any, fault: str, nothing_written: None) -> None:
    heads, message = HEAD_FAULTS[fault]
    case = with_heads(make_case(46, t=5, heads=(2, 4)), **heads)
    with pytest.raises(ValueError, match=message):
        run(case, backend)


def layout_case() -> Case:
    """One token that reads row 0 of the state [[1, 2], [3, 4]] and writes nothing."""
    q = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
    zeros = np.zeros((1, 1, 1), np.float32)
    state = np.array([[1, 2], [3, 4]], np.float32).reshape(1, 1, 2, 2)
    return Case(q, q, np.full_like(q, 7), zeros, zeros, state, scale=1.0)


@pytest.mark.parametrize("v_first", [False, True])
def test_t047_state_is_read_in_the_layout_of_the_flag(backend: str, v_first: bool) -> None:
    case = layout_case()
    transposed = case.but(state=case.state.swapaxes(2, 3))
    right, wrong = (transposed, case) if v_first else (case, transposed)
    out, state = run_fla(right, backend, state_v_first=v_first)
    assert out.ravel().tolist() == [1, 2]
    np.testing.assert_array_equal(state, right.state)
    out, state = run_fla(wrong, backend, state_v_first=v_first)
    assert out.ravel().tolist() == [1, 3]
    np.testing.assert_array_equal(state, wrong.state)


def test_t047_cann_states_are_v_first(chunk_backend: str) -> None:
    case = layout_case()
    tensors = [x[0] for x in (case.q, case.k, case.v)]
    out, state = npu_chunk_gated_delta_rule(
        *tensors, beta=case.beta[0], initial_state=case.state, actual_seq_lengths=[1], backend=chunk_backend
    )
    assert out.ravel().tolist() == [1, 3]
    np.testing.assert_array_equal(state, case.state)


@pytest.mark.parametrize("v_first", [False, True])
def test_t047_both_layouts_give_the_same_result(backend: str, v_first: bool) -> None:
    case = make_case(47, t=20, heads=(1, 2), dims=(8, 5))
    first = run_fla(case, backend)
    out, state = run_fla(case.but(state=case.state.swapaxes(2, 3)), backend, state_v_first=True)
    assert state.shape == (1, 2, 5, 8)
    second = first._replace(out=out, state=state.swapaxes(2, 3))
    if backend == "recurrent":
        # Fast promises its bits for one layout: it sums along rows where states are V first.
        assert_within(case, second, out=1e-6, state=1e-6, expected=first)
    else:
        assert_same_bits(second, first)
    turned = case.but(state=case.state if v_first else case.state.swapaxes(2, 3))
    with pytest.raises(
        ValueError, match=r"`initial_state` must be \[N, Hv, D., D.\] = \[1, 2, ., .\], got \[1, 2, ., .\]"
    ):
        run_fla(turned, backend, state_v_first=v_first)


@pytest.mark.parametrize(("t", "heads", "batch"), [(4, 4, 2), (2, 32, 1)], ids=["T = H", "T < H"])
def test_t050_axes_are_tokens_then_heads(backend: str, t: int, heads: int, batch: int) -> None:
    case = make_case(50, t=t, heads=(heads, heads), batch=batch, dims=(8, 8))
    assert_within(case, run_fla(case, backend), out=1e-5, state=1e-5)


def test_t050_head_first_tensors_are_refused(backend: str, nothing_written: None) -> None:
    case = make_case(50, t=2, heads=(32, 32), dims=(8, 8))
    turned = {name: getattr(case, name).swapaxes(1, 2) for name in ("q", "k", "v")}
    with pytest.raises(ValueError, match=r"`g` must be \[B, T, Hv\] = \[1, 32, 2\], got \[1, 2, 32\]"):
        run_fla(case.but(**turned), backend)
    with pytest.raises(ValueError, match=r"`beta` must be \[B, T, Hv\] = \[1, 32, 2\], got \[1, 2, 32\]"):
        run_fla(case.but(**turned, g=case.g.swapaxes(1, 2)), backend)
    with pytest.raises(TypeError, match=r"'head_first'.*known to fla: tensors are"):
        run_fla(case, backend, head_first=True)


CU_FAULTS: dict[str, tuple[Any, int, str]] = {
    "begins behind 0": ([1, 5], 5, r"`cu_seqlens` must be .* begin at 0, .* got \[1, 5\]"),
    "ends before T": ([0, 5], 6, r"`cu_seqlens` must be .* end at T = 6, got \[0, 5\]"),
    "ends behind T": ([0, 7], 6, r"`cu_seqlens` must be .* end at T = 6, got \[0, 7\]"),
    "falls": ([0, 4, 2, 6], 6, r"`cu_seqlens` must be .* never fall .* got \[0, 4, 2, 6\]"),
    "empty": ([], 6, r"`cu_seqlens` must be .* begin at 0, .* got \[\]"),
    "negative": ([0, -1], 6, r"`cu_seqlens` must be .* got \[0, -1\]"),
    "two axes": (np.array([[0, 6]]), 6, r"`cu_seqlens` must have one axis, got 2 axes: \[1, 2\]"),
    "no axis": (np.array(6), 6, r"`cu_seqlens` must have one axis, got 0 axes"),
    "floats": ([0.0, 6.0], 6, r"`cu_seqlens` must hold integers, got"),
    "beyond int64": (
        np.array([0, 2**64 - 1], np.uint64),
        6,
        r"`cu_seqlens` must fit in int64, got 18446744073709551615",
    ),
}


@pytest.mark.parametrize("fault", CU_FAULTS)
def test_t055_running_sums_that_are_none(backend: str, fault: str, nothing_written: None) -> None:
    cu, t, message = CU_FAULTS[fault]
    case = make_case(55, t=t).but(cu=None)
    before = case.state.copy()
    with pytest.raises(ValueError, match=message):
        run_fla(case.but(cu=cu), backend)
    np.testing.assert_array_equal(case.state, before)


def test_t055_batches_are_not_packed(backend: str, nothing_written: None) -> None:
    case = make_case(55, t=6, batch=2)
    with pytest.raises(ValueError, match=r"`q` must have B = 1 where `cu_seqlens` is given, got B = 2"):
        run_fla(case.but(cu=[0, 6]), backend)


@pytest.mark.parametrize("n_states", [1, 3])
def test_t055_one_state_a_sequence(backend: str, n_states: int, nothing_written: None) -> None:
    case = make_case(55, t=6, cu=(0, 2, 6))
    case = case.but(state=np.resize(case.state, (n_states, 1, 16, 16)))
    for run in (run_fla, run_cann):
        with pytest.raises(ValueError, match=rf"`initial_state` must be .* = \[2, 1, 16, 16\], got \[{n_states}, 1"):
            run(case, backend)


LENGTH_FAULTS: dict[str, tuple[Any, str]] = {
    "too few tokens": ([5], r"lengths of at least 0 with the sum T = 6, got \[5\] with the sum 5"),
    "too many tokens": ([5, 2], r"with the sum T = 6, got \[5, 2\] with the sum 7"),
    "negative": ([8, -2], r"at least 0 .* got \[8, -2\]"),
    "running sums": ([0, 6, 6], r"with the sum T = 6, got \[0, 6, 6\] with the sum 12"),
    "empty": ([], r"with the sum T = 6, got \[\] with the sum 0"),
    "two axes": (np.array([[6]]), r"`actual_seq_lengths` must have one axis, got 2 axes"),
    "floats": (np.array([6.0]), r"`actual_seq_lengths` must hold integers, got float64"),
}


@pytest.mark.parametrize("fault", LENGTH_FAULTS)
def test_t055_lengths_that_are_none(backend: str, fault: str, nothing_written: None) -> None:
    lengths, message = LENGTH_FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        call_cann_with_lengths(lengths, backend)


def call_cann_with_lengths(lengths: Any, backend: str) -> Any:
    """Six tokens through the CANN function, with lengths as given and a state for each."""
    case = make_case(55, t=6)
    state = np.zeros((max(np.asarray(lengths).size, 1), 1, 16, 16), np.float32)
    tensors = [x[0] for x in (case.q, case.k, case.v)]
    return npu_chunk_gated_delta_rule(
        *tensors, g=case.g[0], beta=case.beta[0], initial_state=state, actual_seq_lengths=lengths, backend=backend
    )


def combinations(values: list[tuple[str, Any]]) -> Callable[..., Any]:
    """One test for every result dtype, named."""
    return pytest.mark.parametrize("dtypes", [v for _, v in values], ids=[n for n, _ in values])


@combinations(
    [
        ("bf16 with fp32 gates and state", (bf16, np.float32, np.float32, np.float32)),
        ("bf16 gates", (bf16, bf16, bf16, np.float32)),
        ("bf16 throughout", (bf16, bf16, bf16, bf16)),
        ("fp16 with fp32 gates", (np.float16, np.float32, np.float16, np.float16)),
        ("fp32 with fp64 gates and state", (np.float32, np.float64, np.float64, np.float64)),
        ("fp32 with fp16 gates and state", (np.float32, np.float16, bf16, np.float16)),
    ]
)
def test_t094_mixed_dtypes(backend: str, dtypes: tuple[type, ...]) -> None:
    qkv, g, beta, state = dtypes
    case = make_case(94, t=70, heads=(1, 2), dims=(8, 8)).cast(qkv)
    case = case.but(g=case.g.astype(g), beta=case.beta.astype(beta), state=case.state.astype(state))
    bound = {np.float32: 1e-5, np.float16: 1.5e-3, bf16: 5e-3}
    fla = run_fla(case, backend)
    assert fla.out.dtype == qkv
    assert fla.state.dtype == np.float32
    assert_within(case, fla, out=bound[qkv], state=1e-5)
    cann = run_cann(case, backend)
    assert cann.out.dtype == qkv
    assert cann.state.dtype == state
    assert_within(case, cann, out=bound[qkv], state=bound.get(state, 1e-5))


def test_t094_float64_is_for_golden(backend: str) -> None:
    case = make_case(94, t=5, dtype=np.float64)
    for run in (run_fla, run_cann):
        if backend == "golden":
            out, state = run(case, backend)
            assert out.dtype == state.dtype == np.float64
        else:
            with pytest.raises(TypeError, match=r"float64 q, k and v are golden's only.*cast them"):
                run(case, backend)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_t094_integers_are_refused(backend: str, name: str, nothing_written: None) -> None:
    case = make_case(94, t=5)
    whole = case.but(**{name: np.ones_like(getattr(case, name), np.int32)})
    for run in (run_fla, run_cann):
        with pytest.raises(TypeError, match="must be float16, bfloat16, float32 or float64, got int32"):
            run(whole, backend)


@pytest.mark.parametrize("name", ["k", "v"])
def test_t094_q_k_and_v_are_of_one_dtype(backend: str, name: str, nothing_written: None) -> None:
    case = make_case(94, t=5)
    for run, letter in ((run_fla, name), (run_cann, {"k": "key", "v": "value"}[name])):
        with pytest.raises(TypeError, match=rf"`{letter}` must have the dtype of `q(uery)?`, float32, got bfloat16"):
            run(case.but(**{name: getattr(case, name).astype(bf16)}), backend)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, list, tuple])
def test_t118_lengths_of_any_integer_type(chunk_backend: str, kind: type) -> None:
    sums = [0, 3, 3, 66, 70]
    case = make_case(118, t=70, heads=(1, 2), dims=(8, 8), cu=np.array(sums, np.int64))
    expected = run_fla(case, chunk_backend)
    values = kind(sums) if kind in (list, tuple) else np.array(sums, kind)
    assert_same_bits(run_fla(case.but(cu=values), chunk_backend), expected)
    lengths = kind([3, 0, 63, 4]) if kind in (list, tuple) else np.array([3, 0, 63, 4], kind)
    tensors = [x[0] for x in (case.q, case.k, case.v)]
    out, state = npu_chunk_gated_delta_rule(
        *tensors, g=case.g[0], beta=case.beta[0], initial_state=case.state.swapaxes(2, 3), scale=case.factor,
        actual_seq_lengths=lengths, backend=chunk_backend,
    )  # fmt: skip
    assert_same_bits(expected._replace(out=out[None], state=state.swapaxes(2, 3)), expected)


def test_t119_starts_are_summed_in_64_bits() -> None:
    starts = packed(np.array([2**30, 2**30, 2**31 - 1, 5], np.int32)).start
    assert starts.dtype == np.int64
    assert starts.tolist() == [0, 2**30, 2**31, 2**32 - 1]
    assert packed(np.array([2**20, 1], np.int32)).start[1] * np.int64(4096) == 4294967296


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_t119_sums_that_wrap_are_seen(backend: str, dtype: type) -> None:
    half = int(np.iinfo(dtype).max // 2 + 1)
    with pytest.raises(ValueError, match=r"with the sum|must fit in int64"):
        call_cann_with_lengths(np.array([half, half, half, half, 6], dtype), backend)


def test_t119_tokens_further_apart_than_32_bits(backend: str, tmp_path: Path) -> None:
    case = make_case(119, t=3, dims=(4, 4), dtype=np.float16)
    far = 2**31 + 64
    # A file with holes: 8 GiB of addresses, a few pages of memory.
    halves = np.memmap(tmp_path / "sparse", np.float16, mode="w+", shape=(2 * far + 16,))
    (tmp_path / "sparse").unlink()
    spread = {}
    for i, name in enumerate(("q", "k", "v")):
        spread[name] = np.lib.stride_tricks.as_strided(halves[4 * i :], case.q.shape, (0, 2 * far, 8, 2))
        spread[name][...] = getattr(case, name)
    assert_same_bits(run_fla(case.but(**spread), backend), run_fla(case, backend))


@pytest.mark.parametrize("name", ["chunk_size", "transpose_state_layout", "cu_seqlens_cpu", "nonsense"])
def test_t046_keywords_that_are_not_offered(chunk_backend: str, name: str) -> None:
    case = make_case(46, t=2)
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
        chunk_gated_delta_rule(case.q, case.k, case.v, case.g, case.beta, backend=chunk_backend, **{name: 64})
