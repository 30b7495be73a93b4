"""The recurrent operator over a pool, on every backend: results, dtypes, arguments, splits, random calls."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import npu_recurrent_gated_delta_rule
from conftest import COMPILED
from pool_cases import (
    DTYPES,
    assert_right,
    every_backend,
    make_pool_case,
    run,
    same,
    tokens,
)

ROUNDING = {np.float16: 4e-4, ml_dtypes.bfloat16: 4e-3, np.float32: 1e-5}
"""Bounds of relative rms for results that are rounded once, by dtype."""


@every_backend
@pytest.mark.parametrize("gates", ["", "g", "scalar", "vector", "g vector"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 16, 24), (2, 6, 20, 7), (3, 3, 33, 16)], ids=str)
def test_against_the_token_loop(backend: str, shape: tuple[int, int, int, int], gates: str) -> None:
    hk, hv, dk, dv = shape
    case = make_pool_case(1, (1, 4, 0, 8), heads=(hk, hv), dims=(dk, dv), gates=gates, accepted=True)
    assert_right(case, run(case, backend), 1e-5)


@every_backend
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_out_and_pool(backend: str, dtype: Any, state: Any) -> None:
    case = make_pool_case(2, (2, 3), dims=(24, 16), dtype=dtype, state=state)
    result = run(case, backend)
    assert (result.out.dtype, result.pool.dtype) == (np.dtype(dtype), np.dtype(state))
    assert_right(case, result, ROUNDING[dtype], ROUNDING[state])


def test_golden_in_float64_has_no_rounding_to_speak_of() -> None:
    case = make_pool_case(3, (5, 12, 1), heads=(2, 4), gates="g vector", accepted=True, dtype=np.float64)
    assert_right(case, run(case, "golden"), 1e-12)


@every_backend
def test_scale_none_is_1(backend: str) -> None:
    case = make_pool_case(4, (2,))
    same(run(case.but(scale=None), backend), run(case.but(scale=1.0), backend))
    assert_right(case.but(scale=None), run(case.but(scale=None), backend), 1e-5)


@every_backend
def test_inputs_are_not_modified(backend: str) -> None:
    case = make_pool_case(5, (2, 3), gates="g vector", accepted=True)
    before = {name: x.copy() for name, x in case.arguments().items() if isinstance(x, np.ndarray)}
    run(case, backend)
    for name, x in before.items():
        np.testing.assert_array_equal(getattr(case, {"ssm_state_indices": "slots"}.get(name, name)), x)


@every_backend
def test_lengths_in_every_form_say_the_same(backend: str) -> None:
    case = make_pool_case(6, (3, 0, 2))
    expected = run(case, backend)
    for form, values in (("start+lengths", (0, 3, 0, 2)), ("cu", (0, 3, 3, 5))):
        same(run(case.but(lengths=values), backend, seq_lens_format=form), expected)


@every_backend
def test_t016_a_vector_gk_of_equal_numbers_is_a_g(backend: str) -> None:
    case = make_pool_case(16, (3, 2))
    wide = np.repeat(case.g[..., None], case.dims.dk, axis=-1)
    a, b = run(case, backend), run(case.but(g=None, gk=wide), backend)
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(a.pool, b.pool, rtol=0, atol=2e-6)
    scalar = run(case.but(g=None, gk=case.g), backend)
    same(scalar, a)


@every_backend
def test_a_dropped_gk_changes_nothing_but_warns(backend: str) -> None:
    case = make_pool_case(17, (2,), gates="g scalar")
    with pytest.warns(UserWarning, match=r"`gk` \[T, Hv\] is dropped"):
        result = run(case, backend)
    same(result, run(case.but(gk=None), backend))


@every_backend
def test_splits_of_a_call_change_no_bit(backend: str) -> None:
    """Where the pool keeps every bit of a state: float32, in golden float64."""
    exact = np.float64 if backend == "golden" else np.float32
    case = make_pool_case(18, (8,), gates="g vector", n_slots=9).cast(np.float32, exact)
    case = case.but(slots=np.zeros(8, int))
    whole = run(case, backend)
    pool, outs = case.state.copy(), []
    for begin, end in ((0, 1), (1, 4), (4, 8)):
        outs.append(run(tokens(case, list(range(begin, end)), (end - begin,)), backend, pool=pool).out)
    same(whole, whole._replace(out=np.concatenate(outs), pool=pool))


@every_backend
def test_calls_without_tokens_or_sequences(backend: str) -> None:
    for lengths in ((), (0,), (0, 0)):
        case = make_pool_case(20, lengths)
        result = run(case, backend)
        assert result.out.shape == (0, 2, 16)
        np.testing.assert_array_equal(result.pool, case.state)


@every_backend
def test_bare_names_are_the_operators(backend: str) -> None:
    """Positional as CANN has them; everything else by keyword only."""
    case = make_pool_case(21, (1,))
    arguments = case.arguments()
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    pool = case.state.copy()
    out = npu_recurrent_gated_delta_rule(*tensors, pool, **arguments, backend=backend)
    same(run(case, backend), run(case, backend)._replace(out=out, pool=pool))
    with pytest.raises(TypeError, match="positional"):
        npu_recurrent_gated_delta_rule(*tensors, pool, case.beta)  # type: ignore[call-arg, misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'axpy'"):
        npu_recurrent_gated_delta_rule(*tensors, pool, **arguments, axpy="fused")  # type: ignore[call-arg]


@pytest.mark.slow
@every_backend
@pytest.mark.parametrize("seed", range(12 if COMPILED else 0))
def test_random_calls(backend: str, seed: int) -> None:
    rng = np.random.default_rng([34, seed])
    hk = int(rng.integers(1, 5))
    lengths = tuple(int(n) for n in rng.integers(0, 9, int(rng.integers(1, 5))))
    case = make_pool_case(
        seed,
        lengths,
        heads=(hk, hk * int(rng.integers(1, 4))),
        dims=(int(rng.integers(1, 129)), int(rng.integers(1, 129))),
        gates=str(rng.choice(["", "g", "scalar", "vector", "g vector"])),
        accepted=bool(rng.integers(2)),
    )
    assert_right(case, run(case, backend), 1e-5)
