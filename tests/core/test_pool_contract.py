"""Every line of the pool's contract: what is refused, with which words, before anything is written."""

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import ContractError, DtypeError, npu_recurrent_gated_delta_rule
from cgdr_numba.core import memory
from cgdr_numba.core.contract import Tensors
from cgdr_numba.core.pool_contract import PoolLengths, PoolProblem, pool_problem
from cgdr_numba.core.slots import SlotIndices
from pool_cases import PoolCase, make_pool_case, run


def problem_of(case: PoolCase, form: str = "lengths", **changes: Any) -> PoolProblem:
    """The problem of a case, arguments exchanged."""
    given = {**case.arguments(), "state": case.state, **changes}
    return pool_problem(
        "op",
        Tensors(*(given[name] for name in ("query", "key", "value", "g", "beta", "state"))),
        gk=given["gk"],
        scale=given["scale"],
        lengths=PoolLengths(given["actual_seq_lengths"], form),
        indices=SlotIndices(given["ssm_state_indices"], given["num_accepted_tokens"], given["read_indices"]),
    )


@pytest.fixture
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result and no scratch may be allocated, so nothing can have been computed."""

    def refuse(shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError(f"allocated {shape} of {dtype} before the contract was checked")

    monkeypatch.setattr(memory, "empty", refuse)
    monkeypatch.setattr(memory, "result", refuse)


CASE = make_pool_case(1, (2, 3), heads=(2, 4), dims=(8, 16), gates="g vector")
"""T 5, N 2, slots 8."""


def turned(x: Any) -> Any:
    """The last two axes exchanged in memory."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"key": CASE.key[..., :7]}, r"`key` must be \[T, Hk, Dk\] = \[5, 2, 8\], got \[5, 2, 7\]"),
    "value's tokens": ({"value": CASE.value[:4]}, r"`value` must be \[T, Hv, Dv\] = \[5, 4, 16\], got \[4, 4, 16\]"),
    "heads": ({"value": CASE.value[:, :3]}, r"Hv a multiple of Hk = 2 .*, got Hv = 3"),
    "rank": ({"query": CASE.query[None]}, r"`query` must be \[T, Hk, Dk\] \(3 axes\), got 4 axes"),
    "beta": ({"beta": CASE.beta[:, :2]}, r"`beta` must be \[T, Hv\] = \[5, 4\], got \[5, 2\]"),
    "no beta": ({"beta": None}, r"`beta` must be a NumPy array, got builtins.NoneType"),
    "g": ({"g": CASE.g[:4]}, r"`g` must be \[T, Hv\] = \[5, 4\], got \[4, 4\]"),
    "gk's width": ({"gk": CASE.gk[..., :7]}, r"`gk` must be \[T, Hv, Dk\] = \[5, 4, 8\], got \[5, 4, 7\]"),
    "gk's heads": ({"gk": CASE.gk[:, :2, 0]}, r"`gk` must be \[T, Hv\] = \[5, 4\], got \[5, 2\]"),
    "gk's rank": ({"gk": CASE.gk[0, 0]}, r"`gk` must be \[T, Hv\] or \[T, Hv, Dk\], got 1 axes: \[8\]"),
    "pool's layout": (
        {"state": CASE.state.swapaxes(2, 3)},
        r"`state` must be .* = \[8, 4, 16, 8\], got \[8, 4, 8, 16\]",
    ),
    "pool's heads": ({"state": CASE.state[:, :2]}, r"`state` must be \[slots, Hv, Dv, Dk\] = \[8, 4, 16, 8\], got"),
    "pool's rank": ({"state": CASE.state[0]}, r"`state` must be \[slots, Hv, Dv, Dk\] \(4 axes\), got 3 axes"),
    "pool's rows": (
        {"state": turned(CASE.state)},
        r"`state` must have adjacent elements on its last axis, got a stride of 64 bytes",
    ),
    "a pool over itself": (
        {"state": np.lib.stride_tricks.as_strided(CASE.state.copy(), CASE.state.shape, (0, *CASE.state.strides[1:]))},
        r"`state` must not overlap itself, got strides \[0, 512, 32, 4\]",
    ),
    "slots over one another": (
        {"state": np.lib.stride_tricks.as_strided(CASE.state.copy(), (8, 4, 16, 8), (1024, 512, 32, 4))},
        r"`state` must not overlap itself, got strides \[1024, 512, 32, 4\]",
    ),
    "lengths too long": ({"actual_seq_lengths": [2, 4]}, r"a sum of at most T = 5, got \[2, 4\] with the sum 6"),
    "a negative length": ({"actual_seq_lengths": [-1, 6]}, r"\[N\] lengths of at least 0 .* got \[-1, 6\]"),
    "hostile lengths": (
        {"actual_seq_lengths": [2**62, 2**62, 2**62, 2**62, 5]},
        r"at most T = 5, got .* with the sum 18446744073709551621",
    ),
    "lengths of floats": ({"actual_seq_lengths": np.ones(2)}, r"`actual_seq_lengths` must hold integers, got float64"),
    "slots": ({"ssm_state_indices": [0, 1, 2]}, r"`ssm_state_indices` must be \[T\] = \[5\], got \[3\]"),
    "a slot too many": ({"ssm_state_indices": [0, 1, 8, 3, 4]}, r"from 0 to 7, or -1 for padding, got 8 at token 2"),
    "a huge slot": ({"ssm_state_indices": [0, 1, 2, 10**6, 4]}, r"from 0 to 7, .*got 1000000 at token 3"),
    "slot -2": ({"ssm_state_indices": [0, -2, 2, 3, 4]}, r"from 0 to 7, or -1 for padding, got -2 at token 1"),
    "a pad within": (
        {"ssm_state_indices": [0, 1, 2, -1, 4]},
        r"must be -1 for all tokens of a sequence or for none, got it at token 3 of sequence 1, tokens 2 to 4",
    ),
    "one slot in two": (
        {"ssm_state_indices": [0, 1, 2, 1, 3]},
        r"in one sequence only, got slot 1 in sequences 0 and 1",
    ),
    "accepted": ({"num_accepted_tokens": [1]}, r"`num_accepted_tokens` must be \[N\] = \[2\], got \[1\]"),
    "none accepted": ({"num_accepted_tokens": [1, 0]}, r"from 1 to the sequence's length, 3, got 0 for sequence 1"),
    "too many accepted": ({"num_accepted_tokens": [3, 1]}, r"the sequence's length, 2, got 3 for sequence 0"),
    "both": (
        {"num_accepted_tokens": [1, 1], "read_indices": [5, 6]},
        r"`read_indices` excludes `num_accepted_tokens`, got both",
    ),
    "read": ({"read_indices": [5, 8]}, r"`read_indices` must be slots from 0 to 7, or -1 .* got 8 at sequence 1"),
    "no read": ({"read_indices": [5, -1]}, r"where a sequence has tokens, got -1 for sequence 1 of 3"),
    "read what another writes": (
        {"ssm_state_indices": [0, 1, 2, 3, 4], "read_indices": [3, 5]},
        r"must not be slots that another sequence writes, got slot 3 for sequence 0, which sequence 1 writes",
    ),
    "scale": ({"scale": "1"}, r"`scale` must be a real number or None, got '1'"),
    "format": ({"seq_lens_format": "prefix"}, r'must be "lengths" or "start\+lengths" or "cu", got \'prefix\''),
    "sums": ({"seq_lens_format": "cu", "actual_seq_lengths": [0, 3, 2]}, r"never fall and end at T = 5 .*\[0, 3, 2\]"),
    "sums from 1": ({"seq_lens_format": "cu", "actual_seq_lengths": [1, 5]}, r"sums that begin at 0"),
    "no sums": ({"seq_lens_format": "cu", "actual_seq_lengths": []}, r"\[N \+ 1\] sums"),
    "no start": ({"seq_lens_format": "start+lengths", "actual_seq_lengths": []}, r"the first token and N lengths"),
    "tokens left over": (
        {"actual_seq_lengths": [2, 2]},
        r"for tokens outside of all sequences \(`actual_seq_lengths` sums to 4 of 5 tokens\), got \d at token 4",
    ),
    "integers": ({"query": CASE.query.astype(int)}, r"`query` must be float16, .*, got int64"),
    "two dtypes": ({"value": CASE.value.astype(np.float16)}, r"`value` must have the dtype of `query`, float32"),
    "pool of integers": ({"state": CASE.state.astype(int)}, r"`state` must be float16, .*, got int64"),
    "gk of integers": ({"gk": CASE.gk.astype(int)}, r"`gk` must be float16, .*, got int64"),
    "list": ({"state": CASE.state.tolist()}, r"`state` must be a NumPy array, got builtins.list"),
    "backend": ({"backend": "quick"}, r"`backend` must be .*, got 'quick'"),
    "threads": ({"threads": 0}, r"`threads` must be from 1"),
    "golden's target": ({"target": "310p"}, r"`target` must be left out with backend=\"golden\""),
    "golden's overflow": ({"overflow": "saturate"}, r"`overflow` must be left out with backend=\"golden\""),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_faults_are_named_and_nothing_is_written(fault: str, nothing_written: None) -> None:
    changes, message = REFUSED[fault]
    given = {"backend": "golden", **CASE.arguments(), "state": CASE.state, **changes}
    before = CASE.state.copy()
    with pytest.raises(ContractError, match=r"^npu_recurrent_gated_delta_rule: .*" + message):
        npu_recurrent_gated_delta_rule(**given)
    np.testing.assert_array_equal(CASE.state, before)


def test_dtype_faults_are_type_errors_too() -> None:
    for fault in ("integers", "two dtypes", "pool of integers", "gk of integers", "list", "lengths of floats"):
        with pytest.raises(DtypeError):
            npu_recurrent_gated_delta_rule(**{"state": CASE.state, **CASE.arguments(), **REFUSED[fault][0]})


def test_pools_that_cannot_be_written_or_are_inputs_too_are_refused(nothing_written: None) -> None:
    frozen = CASE.state.copy()
    frozen.flags.writeable = False
    with pytest.raises(ContractError, match="`state` must be writable, got a read-only array"):
        run(CASE, "golden", frozen)
    for name in ("query", "key", "value", "beta", "g", "gk"):
        array = getattr(CASE, name)
        page = np.zeros(CASE.state.size + array.size, np.float32)
        pool = page[: CASE.state.size].reshape(CASE.state.shape)
        shared = page[CASE.state.size - 1 :][: array.size].reshape(array.shape)
        with pytest.raises(ContractError, match=f"`state` must share no memory with inputs, got some of `{name}`"):
            run(CASE.but(**{name: shared}), "golden", pool)


def test_inputs_are_views_and_constants_take_no_memory() -> None:
    case = CASE.but(g=None, gk=None)
    problem = problem_of(case)
    for name, array in (("q", case.query), ("k", case.key), ("v", case.value), ("pool", case.state)):
        assert getattr(problem, name) is array
    assert problem.g.shape == (5, 4)
    assert problem.g.strides == (0, 0)
    assert problem.gk is None
    assert problem.gates == (False, "none")
    assert problem.dims == case.dims


def test_slots_by_accepted_tokens_and_by_read_indices() -> None:
    case = make_pool_case(2, (1, 4, 0, 3), n_slots=30)
    slots = case.slots.tolist()
    assert problem_of(case).read_slot.tolist() == [slots[0], slots[1], -1, slots[5]]
    accepted = problem_of(case, num_accepted_tokens=np.array([1, 3, 99, 3], np.uint8))
    assert accepted.read_slot.tolist() == [slots[0], slots[3], -1, slots[7]]
    assert accepted.write_slot.tolist() == slots
    free = sorted(set(range(30)) - set(slots))
    read = problem_of(case, read_indices=[free[0], free[0], -1, slots[5]])
    assert read.read_slot.tolist() == [free[0], free[0], -1, slots[5]], "two sequences may begin with one state"


def test_formats_of_lengths_say_the_same() -> None:
    case = make_pool_case(3, (1, 0, 4))
    expected = problem_of(case)
    for form, values in (("start+lengths", [0, 1, 0, 4]), ("cu", [0, 1, 1, 5])):
        problem = problem_of(case, form, actual_seq_lengths=np.array(values, np.int32))
        assert problem.lengths == expected.lengths == (1, 0, 4)
        assert problem.sequences.start.tolist() == expected.sequences.start.tolist() == [0, 1, 1]


def test_tokens_before_the_start_and_behind_the_sums_are_padding() -> None:
    case = make_pool_case(4, (2, 2, 2))
    slots = np.where(np.arange(6) % 5 == 0, -1, case.slots)
    problem = problem_of(case, "start+lengths", actual_seq_lengths=[1, 2, 2], ssm_state_indices=slots)
    assert problem.sequences.start.tolist() == [1, 3]
    assert problem.padding.tolist() == [0, 5]
    problem = problem_of(case, ssm_state_indices=[1, 2, -1, -1, 3, 4], num_accepted_tokens=[2, 0, 1])
    assert problem.lengths == (2, 0, 2)
    assert problem.padding.tolist() == [2, 3]
    assert problem.read_slot.tolist() == [2, -1, 3]


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_t118_indices_of_any_integer_type(dtype: str) -> None:
    case = make_pool_case(5, (2, 3), accepted=True)
    problem = problem_of(
        case,
        actual_seq_lengths=np.array(case.lengths, dtype),
        ssm_state_indices=case.slots.astype(dtype),
        num_accepted_tokens=np.array(case.accepted, dtype),
    )
    expected = problem_of(case)
    for name in ("read_slot", "write_slot", "padding"):
        actual = getattr(problem, name)
        assert actual.dtype == np.int64
        assert actual.tolist() == getattr(expected, name).tolist()


def test_a_scalar_gk_is_dropped_beside_g_and_said() -> None:
    both = make_pool_case(6, (2,), gates="g scalar")
    with pytest.warns(UserWarning, match=r"^op: `gk` \[T, Hv\] is dropped, as the kernel does where `g` is given"):
        problem = problem_of(both)
    assert problem.gk is None
    assert problem.gates == (True, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert problem_of(both.but(g=None)).gates == (False, "scalar")
        assert problem_of(make_pool_case(6, (2,), gates="g vector")).gates == (True, "vector")


def test_a_faulty_call_does_not_warn_first() -> None:
    both = make_pool_case(6, (2,), gates="g scalar")
    with warnings.catch_warnings(), pytest.raises(ContractError):
        warnings.simplefilter("error")
        problem_of(both, ssm_state_indices=[99, 98])


def test_where_dk_is_1_the_kernel_takes_every_gk_as_a_vector() -> None:
    case = make_pool_case(7, (2,), dims=(1, 4), gates="g scalar")
    problem = problem_of(case)
    assert problem.gates == (True, "vector")
    assert problem.gk is not None
    assert problem.gk.shape == (2, 2, 1)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_pools_of_every_float_and_larger_strides_are_taken(dtype: Any) -> None:
    state = CASE.state.astype(dtype)
    page = np.zeros((8, 6, 20, 9), dtype)[:, 1:5, :16, :8]
    page[...] = state
    for pool in (state, page, page[::-1], page[:, ::-1], state[:1], state[:0]):
        slots = [0] * 5 if len(pool) else [-1] * 5
        lengths = [5] if len(pool) == 1 else [2, 3]
        slots = CASE.slots if len(pool) > 1 else slots
        assert problem_of(CASE, state=pool, ssm_state_indices=slots, actual_seq_lengths=lengths).pool is pool


def test_calls_without_tokens() -> None:
    empty = make_pool_case(8, (0, 0))
    assert problem_of(empty).lengths == (0, 0)
    nothing = make_pool_case(8, ())
    assert problem_of(nothing).dims.n_sequences == 0
    result = run(empty, "golden")
    assert result.out.shape == (0, 2, 16)
    np.testing.assert_array_equal(result.pool, empty.state)
