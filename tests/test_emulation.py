"""The emulation alone: against a float64 token loop, exact rational arithmetic and numbers found by hand."""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from emulation import (
    FLOAT32_MAX,
    VectorPipe,
    chunk,
    emulate_chunk,
    fused_multiply_add,
    narrow,
    phase_1b,
    phase_2,
    phase_3,
    phase_3_5,
    phase_4a,
    phase_4d,
    phase_5,
    scalar_exp,
    step_1,
    step_4,
    step_5,
    step_7,
)

pytestmark = pytest.mark.filterwarnings("error")

F32 = np.float32
IEEE, SATURATE = VectorPipe("two-roundings", "ieee"), VectorPipe("two-roundings", "saturate")
OPTIONS = list(product(("two-roundings", "fused"), ("ieee", "saturate")))
# lengths, n_key_heads, n_value_heads, dk, dv
SHAPES = {
    "one-token": ((1,), 1, 1, 16, 16),
    "short-tail": ((5,), 1, 2, 8, 3),
    "full-chunk": ((64,), 1, 1, 128, 128),
    "one-over": ((65,), 1, 1, 64, 32),
    "several-chunks": ((200,), 2, 2, 32, 48),
    "dot-tail": ((70,), 1, 1, 131, 17),
    "gqa": ((40,), 2, 6, 24, 16),
    "several-sequences": ((3, 0, 64, 130, 1), 2, 4, 16, 24),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Infinities and NaN are results here, not accidents."""
    with np.errstate(all="ignore"):
        yield


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal dtype, shape and bits, signs of zeros included; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual) & (actual == 0), np.signbit(expected) & (expected == 0))


def make_case(shape: str, dtype: type, seed: int = 1) -> dict:
    """Random inputs of the documented domain: unit q and k, 0 < beta < 1, g <= 0 in float32."""
    lengths, n_key_heads, n_value_heads, dk, dv = SHAPES[shape]
    rng, n_tokens = np.random.default_rng(seed), sum(lengths)
    q, k = rng.standard_normal((2, n_tokens, n_key_heads, dk))
    return {
        "query": (q / np.linalg.norm(q, axis=-1, keepdims=True)).astype(dtype),
        "key": (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
        "value": rng.standard_normal((n_tokens, n_value_heads, dv)).astype(dtype),
        "beta": rng.uniform(0.05, 0.95, (n_tokens, n_value_heads)).astype(dtype),
        "initial_state": rng.standard_normal((len(lengths), n_value_heads, dv, dk)).astype(dtype),
        "g": rng.uniform(-0.3, 0, (n_tokens, n_value_heads)).astype(np.float32),
        "lengths": np.array(lengths, np.int32),
        "scale": dk**-0.5,
    }


def token_loop(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """float64: S <- exp(g) S; S += beta k (v - k^T S)^T; o = scale q^T S, token by token."""
    q, k, v, beta, g, states = (
        np.array(case[name], np.float64) for name in ("query", "key", "value", "beta", "g", "initial_state")
    )
    out, heads_per_key = np.zeros(v.shape), v.shape[1] // q.shape[1]
    sequence_of_token = np.repeat(np.arange(len(case["lengths"])), case["lengths"])
    for t, sequence in enumerate(sequence_of_token):
        for head in range(v.shape[1]):
            s, qk_head = states[sequence, head], head // heads_per_key
            s *= np.exp(g[t, head])
            s += beta[t, head] * np.outer(v[t, head] - s @ k[t, qk_head], k[t, qk_head])
            out[t, head] = case["scale"] * (s @ q[t, qk_head])
    return out, states


def relative_rms(actual: np.ndarray, expected: np.ndarray) -> float:
    error = np.asarray(actual, np.float64) - expected
    return math.sqrt(np.mean(error**2) / np.mean(expected**2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 4e-4), (ml_dtypes.bfloat16, 3e-3)])
@pytest.mark.parametrize(("axpy", "overflow"), OPTIONS)
def test_token_loop(shape: str, dtype: type, tolerance: float, axpy: str, overflow: str) -> None:
    case = make_case(shape, dtype)
    out, state = emulate_chunk(**case, axpy=axpy, overflow=overflow)
    expected_out, expected_state = token_loop(case)
    assert out.dtype == dtype
    assert state.dtype == dtype
    assert relative_rms(out, expected_out) <= tolerance
    assert relative_rms(state, expected_state) <= tolerance


def literal_dot(pipe: VectorPipe, a: np.ndarray, b: np.ndarray) -> np.float32:
    """Full groups of 64 by halves (the same tree as adjacent pairs), then a scalar sum of groups and tail."""

    def tree(p: np.ndarray) -> np.ndarray:
        half = len(p) // 2
        return pipe.add(tree(p[:half]), tree(p[half:])) if half else p[0]

    p = pipe.mul(a, b)
    full = len(p) // 64 * 64
    s = F32(0)
    for term in [tree(p[at : at + 64]) for at in range(0, full, 64)] + list(p[full:]):
        s = s + term
    return s


def literal_chunk(pipe: VectorPipe, rows: tuple, scale: np.float32, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The phases in the kernel's own loop order, one row and one Axpy at a time."""
    q, k, v, beta, g = rows
    (n, dk), dv = k.shape, v.shape[1]
    g_cum = pipe.mul(np.array([sum(g[: i + 1], F32(0)) for i in range(n)], np.float32), F32(1))
    e = pipe.exp(g_cum)
    kb = np.stack([pipe.mul(k[i], beta[i]) for i in range(n)])
    vb = np.stack([pipe.mul(v[i], beta[i]) for i in range(n)])
    a, m = np.zeros((2, n, n), np.float32)
    kc, (u, o, vn) = np.zeros((n, dk), np.float32), np.zeros((3, n, dv), np.float32)
    for i in range(n):
        decay = pipe.exp(pipe.sub(g_cum[i], g_cum[: i + 1]))
        for j in range(i):
            a[i, j] = -literal_dot(pipe, kb[i], k[j]) * decay[j]
        for j in range(i + 1):
            m[i, j] = literal_dot(pipe, pipe.mul(q[i], scale), k[j]) * decay[j]
    for i in range(1, n):
        saved = a[i].copy()
        for j in range(1, i):
            a[i, :j] = pipe.axpy(a[i, :j], saved[j], a[j, :j])
    for i in range(n):
        a[i, i] = 1
        kb[i] = pipe.mul(kb[i], e[i])
        for j in range(i + 1):
            kc[i] = pipe.axpy(kc[i], a[i, j], kb[j])
            u[i] = pipe.axpy(u[i], a[i, j], vb[j])
        w = np.zeros(dv, F32)
        for d in range(dk):
            w = pipe.axpy(w, kc[i, d], s[d])
            o[i] = pipe.axpy(o[i], (q[i, d] * scale) * e[i], s[d])
        vn[i] = pipe.add(u[i], pipe.mul(w, F32(-1)))
        for j in range(i + 1):
            o[i] = pipe.axpy(o[i], m[i, j], vn[j])
    s = np.stack([pipe.mul(s[d], e[n - 1]) for d in range(dk)])
    for i, d in product(range(n), range(dk)):
        s[d] = pipe.axpy(s[d], k[i, d] * scalar_exp(g_cum[n - 1] - g_cum[i]), vn[i])
    return o, s


@pytest.mark.parametrize(("axpy", "overflow"), OPTIONS)
@pytest.mark.parametrize(("n_rows", "dk", "dv"), [(1, 3, 2), (2, 64, 1), (11, 131, 3)])
@pytest.mark.parametrize("size", [1.0, 1e17])
def test_rows_taken_together_change_no_bit(
    axpy: str, overflow: str, n_rows: int, dk: int, dv: int, size: float
) -> None:
    """`size` 1e17 makes products overflow here and there: the infinite and clamped roads are walked too."""
    rng, pipe = np.random.default_rng(2), VectorPipe(axpy, overflow)
    q, k = rng.standard_normal((2, n_rows, dk)).astype(np.float32) * F32(size)
    v, s = (rng.standard_normal((n, dv)).astype(np.float32) for n in (n_rows, dk))
    beta, g = rng.uniform(0, 1, n_rows).astype(np.float32), rng.uniform(-3, 0.5, n_rows).astype(np.float32)
    inputs = (pipe, (q, k, v, beta, g), F32(0.3), s)
    for actual, expected in zip(chunk(*inputs), literal_chunk(*inputs), strict=True):
        assert_same_bits(actual, expected)


def test_float32_state_carries_between_chunks_unrounded() -> None:
    case = make_case("several-chunks", np.float32)
    out, state = emulate_chunk(**case)
    carried = case["initial_state"]
    for start in (0, 64, 128, 192):
        at = slice(start, min(start + 64, 200))
        part = {name: case[name][at] for name in ("query", "key", "value", "beta", "g")}
        part_out, carried = emulate_chunk(**part, initial_state=carried, lengths=[at.stop - start], scale=case["scale"])
        assert_same_bits(part_out, out[at])
    assert_same_bits(carried, state)


def test_no_g_equals_zero_g() -> None:
    case = make_case("several-sequences", np.float16)
    zero = emulate_chunk(**case | {"g": np.zeros_like(case["g"])})
    for actual, expected in zip(emulate_chunk(**case | {"g": None}), zero, strict=True):
        assert_same_bits(actual, expected)


def test_zero_beta_keeps_the_state() -> None:
    case = make_case("several-chunks", np.float16) | {"g": None}
    case["beta"][:] = 0
    _, state = emulate_chunk(**case)
    np.testing.assert_array_equal(state, case["initial_state"])


@pytest.mark.parametrize(("axpy", "overflow"), OPTIONS)
def test_empty_sequence_copies_its_state(axpy: str, overflow: str) -> None:
    case = make_case("several-sequences", np.float16)
    case["initial_state"][1, 0, 0, :2] = np.nan, np.inf
    untouched = {name: np.copy(x) for name, x in case.items()}
    _, state = emulate_chunk(**case, axpy=axpy, overflow=overflow)
    assert_same_bits(state[1], case["initial_state"][1])
    for name, x in untouched.items():
        np.testing.assert_array_equal(case[name], x)


def test_wide_inputs_are_rounded_once() -> None:
    case = make_case("gqa", np.float32)
    wide = {name: case[name].astype(np.float64) * (1 + 2.0**-40) for name in ("beta", "g", "initial_state")}
    out, state = emulate_chunk(**case | wide)
    expected_out, expected_state = emulate_chunk(**case)
    assert_same_bits(out, expected_out)
    assert_same_bits(state, expected_state.astype(np.float64))


def test_causal_even_for_nan() -> None:
    case = make_case("several-chunks", np.float32)
    clean, _ = emulate_chunk(**case)
    for name in ("query", "key", "value", "beta", "g"):
        case[name][100:] = np.nan
    out, state = emulate_chunk(**case)
    assert_same_bits(out[:100], clean[:100])
    assert np.isnan(out[100:]).all()
    assert np.isnan(state).all()


@pytest.mark.parametrize("option", [{"axpy": "fma"}, {"overflow": "wrap"}])
def test_unknown_option(option: dict) -> None:
    with pytest.raises(ValueError, match="unknown option"):
        emulate_chunk(**make_case("one-token", np.float16), **option)


def exact_fma(a: float, x: float, y: float) -> np.float32:
    """a*x + y in rationals, rounded half-to-even to float32's grid; a sum of exactly 0 has IEEE's sign."""
    value = Fraction(a) * Fraction(x) + Fraction(y)
    if value == 0:
        return F32(a * x + y)
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = abs(round(value / quantum) * quantum)
    return F32(math.copysign(math.inf if rounded >= 2**128 else rounded, value))


def assert_exact_fma(a: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    expected = [exact_fma(*triple) for triple in zip(a.tolist(), x.tolist(), y.tolist(), strict=True)]
    assert_same_bits(fused_multiply_add(a, x, y), np.array(expected, np.float32))


def test_fma_on_edge_values() -> None:
    tiny, normal = 2.0**-149, 2.0**-126
    small = floats(0, tiny, 3 * tiny, normal - tiny, normal, 2.0**-75, 2.0**-24)
    large = floats(0.5, 1 - 2.0**-24, 1, 1 + 2.0**-23, 2.0**24 + 2, 2.0**103, FLOAT32_MAX)
    values = np.concatenate([small, large, -small, -large])
    assert_exact_fma(*(np.ravel(axis) for axis in np.meshgrid(values, values, values)))


@pytest.mark.parametrize("kind", ["any-bits", "cancelling", "near-half-ulp", "subnormal"])
def test_fma_on_random_values(kind: str) -> None:
    rng, n = np.random.default_rng(3), 4000
    if kind == "any-bits":
        a, x, y = rng.integers(0, 2**32, (3, n), np.uint32).view(np.float32)
        finite = np.isfinite(a) & np.isfinite(x) & np.isfinite(y)
        a, x, y = a[finite], x[finite], y[finite]
    elif kind == "cancelling":
        a, x = rng.standard_normal((2, n)).astype(np.float32)
        y = -(a * x) + rng.integers(-2, 3, n).astype(np.float32) * F32(2.0**-24)
    elif kind == "near-half-ulp":
        y = rng.standard_normal(n).astype(np.float32)
        a = np.spacing(y) * rng.choice(floats(0.5, 1.5, -0.5, 2.0**-26), n)
        x = 1 + rng.integers(-1, 2, n).astype(np.float32) * F32(2.0**-23)
    else:
        a, x = np.ldexp(rng.standard_normal((2, n)), rng.integers(-80, -68, (2, n))).astype(np.float32)
        y = rng.integers(-5, 6, n).astype(np.float32) * F32(2.0**-149)
    assert_exact_fma(a, x, y)


@pytest.mark.parametrize(
    ("a", "x", "y"), [(24929, 673, 2.0**-60), (24929, 673, -(2.0**-60)), (-24929, 673, -(2.0**-60))]
)
def test_fma_does_not_round_twice(a: float, x: float, y: float) -> None:
    """a*x = +-(2^24 + 1) lies half-way between two float32; y decides, though a float64 sum loses it."""
    away = (y > 0) == (a > 0)
    assert fused_multiply_add(*floats(a, x, y)) == math.copysign(2.0**24 + 2 * away, a)
    assert F32(float(a) * x + y) == math.copysign(2.0**24, a)


@pytest.mark.parametrize(
    ("a", "x", "y", "expected"),
    [
        (math.inf, 0, 1, math.nan),
        (math.inf, 1, -math.inf, math.nan),
        (math.nan, 0, 0, math.nan),
        (0, 0, math.nan, math.nan),
        (math.inf, 2, 5, math.inf),
        (-math.inf, 2, 5, -math.inf),
        (FLOAT32_MAX, FLOAT32_MAX, -math.inf, -math.inf),
        (FLOAT32_MAX, 2, -FLOAT32_MAX, FLOAT32_MAX),
        (FLOAT32_MAX, 2, 0, math.inf),
        (2.0**51, 2.0**52, FLOAT32_MAX, math.inf),
        (2.0**51, 2.0**52 * (1 - 2.0**-24), FLOAT32_MAX, FLOAT32_MAX),
        (-0.0, 1, -0.0, -0.0),
        (-0.0, 1, 0.0, 0.0),
        (1, 1, -1, 0.0),
        (-(2.0**-100), 2.0**-100, 0.0, -0.0),
    ],
)
def test_fma_special_values(a: float, x: float, y: float, expected: float) -> None:
    assert_same_bits(fused_multiply_add(floats(a), floats(x), floats(y)), floats(expected))


def test_only_axpy_is_fused() -> None:
    fused = VectorPipe("fused", "ieee")
    a, y = F32(1 + 2.0**-12), F32(-1 - 2.0**-11)
    assert fused.axpy(y, a, a) == 2.0**-24
    assert IEEE.axpy(y, a, a) == 0
    assert fused.dots(floats(a, 1)[None], floats(a, y)[None])[0, 0] == 0


def test_tree_sum_by_hand() -> None:
    """Adjacent pairs lose both ones; a sequential sum keeps one; eight interleaved accumulators keep both."""
    p = np.zeros(64, np.float32)
    p[[0, 1, 8, 10]] = 1e8, 1, -1e8, 1
    sequential = sum(p, F32(0))
    r = [sum(p[lane::8], F32(0)) for lane in range(8)]
    interleaved = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
    assert (sequential, interleaved) == (1, 2)
    assert IEEE.whole_reduce_sum(p) == 0
    assert IEEE.dots(p[None], np.ones((1, 64), np.float32))[0, 0] == 0


def test_tree_pairs_neighbours_not_halves() -> None:
    p = np.zeros(64, np.float32)
    p[[0, 1, 32]] = 1e8, -1e8, 1
    assert IEEE.whole_reduce_sum(p) == 1
    p[[0, 1, 32]] = 1e8, 1, -1e8
    assert IEEE.whole_reduce_sum(p) == 0


def test_dot_order_of_groups_and_tail() -> None:
    """Dk = 130: (group 0 + group 1) first, then each tail product alone; below 64 plainly sequential."""
    p = np.zeros(130, np.float32)
    p[[0, 64, 128, 129]] = 1, 1e8, -1e8, 1
    assert IEEE.dots(p[None], np.ones((1, 130), np.float32))[0, 0] == 1  # ((1 + 1e8) - 1e8) + 1
    short = floats(1e8, 1, -1e8, 1)[None]
    assert IEEE.dots(short, np.ones_like(short))[0, 0] == 1


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0, 1), (-0.0, 1), (math.inf, math.inf), (-math.inf, 0), (-100, 0), (89, math.inf), (3e38, math.inf)],
)
def test_scalar_exp_edges(x: float, expected: float) -> None:
    result = scalar_exp(F32(x))
    assert isinstance(result, np.float32)
    assert result == expected
    assert not np.signbit(result)


def test_scalar_exp_of_nan() -> None:
    assert np.isnan(scalar_exp(F32(math.nan)))


@pytest.mark.parametrize(("low", "bound"), [(-1.0, 5e-7), (-8.0, 5e-6), (-32.0, 2e-5), (-87.0, 5e-5)])
def test_scalar_exp_error_grows_with_the_halvings(low: float, bound: float) -> None:
    for x in np.linspace(low, 0, 500).astype(np.float32):
        exact = math.exp(float(x))
        assert abs(float(scalar_exp(x)) - exact) <= bound * exact


def literal_scalar_exp(x: np.float32) -> np.float32:
    """The number of halvings k read off the exponent of x, then the roundings in their order."""
    mantissa, exponent = math.frexp(abs(float(x)))
    k = max(exponent - (mantissa == 0.5), 0)
    a = F32(math.ldexp(abs(float(x)), -k))
    terms = [F32(1)]
    for i in range(1, 13):
        ratio = a / F32(i)
        terms.append(terms[-1] * ratio)
    r = sum(terms, F32(0))
    for _ in range(k):
        r = r * r
    return F32(1) / r if x < 0 else r


def test_scalar_exp_bits() -> None:
    x = np.concatenate([floats(2.0**-140, 1, -1, 1 + 2.0**-23, 2, -2, 64, -64), np.linspace(-88, 88, 2001)])
    for value in x.astype(np.float32):
        assert_same_bits(scalar_exp(value), literal_scalar_exp(value))


def test_vector_exp() -> None:
    x = floats(0, 1, -87, -100, -104, 88.5, 89, math.inf, -math.inf, math.nan)
    float64 = [math.exp(v) for v in x[:7].tolist()]
    expected = np.concatenate([np.array(float64).astype(np.float32), floats(math.inf, 0, math.nan)])
    assert_same_bits(IEEE.exp(x), expected)
    assert IEEE.exp(x)[3] == F32(2.0**-149) * 27  # subnormal, where ScalarExp gives 0
    assert_same_bits(SATURATE.exp(x[6:]), floats(FLOAT32_MAX, FLOAT32_MAX, 0, 0))


def test_prefix_sum_saturates_only_when_complete() -> None:
    g = floats(-3e38, -3e38, 3e38)
    assert_same_bits(phase_1b(IEEE, g), floats(-3e38, -math.inf, -math.inf))
    assert_same_bits(phase_1b(SATURATE, g), floats(-3e38, -FLOAT32_MAX, -FLOAT32_MAX))
    assert_same_bits(phase_1b(SATURATE, floats(math.inf, -math.inf)), floats(FLOAT32_MAX, 0))


def test_saturated_tree_but_not_scalar_sums() -> None:
    p = np.zeros(128, np.float32)
    p[:4] = 3e38, 3e38, -3e38, -3e38
    assert np.isnan(IEEE.whole_reduce_sum(p[:64]))
    assert SATURATE.whole_reduce_sum(p[:64]) == 0
    p[:4], p[64] = (3e38, 0, 0, 0), 3e38
    assert SATURATE.dots(p[None], np.ones((1, 128), np.float32))[0, 0] == math.inf


@pytest.mark.parametrize(
    ("axpy", "overflow", "expected"),
    [
        ("two-roundings", "ieee", math.inf),
        ("two-roundings", "saturate", 0),  # the product becomes float32 max
        ("fused", "ieee", 6e38 - float(FLOAT32_MAX)),
        ("fused", "saturate", 6e38 - float(FLOAT32_MAX)),
    ],
)
def test_axpy_saturates_each_rounding(axpy: str, overflow: str, expected: float) -> None:
    result = VectorPipe(axpy, overflow).axpy(floats(-FLOAT32_MAX), F32(3e38), floats(2))
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert VectorPipe("fused", "saturate").axpy(floats(0), F32(math.inf), floats(0)) == 0


def test_vector_rows_are_saturated() -> None:
    """Each case would stay infinite, turn NaN or miss the clamped number if its result were left alone."""
    big, top = floats(3e38)[None], float(FLOAT32_MAX)
    assert phase_2(SATURATE, big, floats(10)) == FLOAT32_MAX
    assert phase_3_5(SATURATE, big, F32(10)) == FLOAT32_MAX
    assert step_1(SATURATE, big, floats(10)) == FLOAT32_MAX
    assert phase_3(SATURATE, floats(0, 100))[1][1, 0] == FLOAT32_MAX
    assert SATURATE.dots(floats(3e38, -3e38)[None], floats(10, 10)[None]) == 0  # products clamped: top - top
    a, kb = floats(1, 0, 1e-10, 1).reshape(2, 2), floats(3e38, 0)[:, None]
    assert phase_5(SATURATE, a, kb, floats(10, 1))[1, 0] == F32(1e-10) * FLOAT32_MAX
    assert step_4(SATURATE, big, floats(-1)[None], big) == FLOAT32_MAX
    assert step_7(SATURATE, floats(1)[None], floats(0), floats(10), big, floats(-top)[None]) == 0


def test_scalars_are_not_saturated() -> None:
    """An infinite coefficient gives float32 max in the Axpy; clamped early it would come back down."""
    big, one, small = floats(3e38)[None], floats(1)[None], floats(1e-10)[None]
    assert SATURATE.dots(floats(3e38, 3e38)[None], floats(1, 1)[None]) == math.inf
    decay = floats(1, math.nan, 10, 10).reshape(2, 2)
    assert phase_4a(SATURATE, floats(1, 3e38)[:, None], floats(1, 1)[:, None], decay)[1, 0] == -math.inf
    assert phase_4d(SATURATE, floats(1, 3e38)[:, None], floats(1, 1)[:, None], decay)[1, 0] == math.inf
    assert step_5(SATURATE, big, F32(10), floats(math.exp(-10)), small) == FLOAT32_MAX
    g_cum, vn = floats(-FLOAT32_MAX, FLOAT32_MAX), floats(1e-10, 0)[:, None]
    assert step_7(SATURATE, floats(1, 1)[:, None], g_cum, floats(0, 1), one, vn) == FLOAT32_MAX
    infinite_key = floats(math.inf, 0)[:, None]  # widened as it is
    assert step_7(SATURATE, infinite_key, floats(0, -10), floats(0, 0), one, vn) == FLOAT32_MAX


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(np.float16, 65504.0), (np.float32, float(FLOAT32_MAX)), (ml_dtypes.bfloat16, 255 * 2.0**120)],
)
def test_final_cast(dtype: type, largest: float) -> None:
    x = floats(math.nan, math.inf, -math.inf, FLOAT32_MAX, -FLOAT32_MAX, 1 + 2.0**-12)
    clamped = narrow(SATURATE, x, np.dtype(dtype)).astype(np.float64)
    one = float(dtype(x[-1]))
    np.testing.assert_array_equal(clamped, [0, largest, -largest, largest, -largest, one])
    kept = narrow(IEEE, x, np.dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(kept[:3], [math.nan, math.inf, -math.inf])


def test_overflowing_decay() -> None:
    """G = 100: ieee meets 0 * inf, saturation clamps the decay and both results."""
    case = {
        "query": np.ones((1, 1, 1), np.float16),
        "key": np.ones((1, 1, 1), np.float16),
        "value": np.ones((1, 1, 2), np.float16),
        "beta": np.zeros((1, 1), np.float16),
        "initial_state": np.array([1, 0], np.float32).reshape(1, 1, 2, 1),
        "lengths": [1],
        "g": np.full((1, 1), 100, np.float32),
    }
    with np.errstate(all="raise"):
        out, state = emulate_chunk(**case)
        clamped_out, clamped_state = emulate_chunk(**case, overflow="saturate")
    assert np.isnan(out).all()
    assert np.isnan(state).all()
    assert_same_bits(clamped_out.ravel(), np.array([65504, 0], np.float16))
    assert_same_bits(clamped_state.ravel(), floats(FLOAT32_MAX, 0))


def test_saturated_nan_value_counts_as_zero() -> None:
    case = make_case("several-chunks", np.float16)
    case["value"][70] = np.nan
    out, state = emulate_chunk(**case, overflow="saturate")
    case["value"][70] = 0
    expected_out, expected_state = emulate_chunk(**case, overflow="saturate")
    assert_same_bits(out, expected_out)
    assert_same_bits(state, expected_state)


def test_saturation_changes_nothing_in_range() -> None:
    case = make_case("several-sequences", np.float16)
    for axpy in ("two-roundings", "fused"):
        ieee = emulate_chunk(**case, axpy=axpy)
        for actual, expected in zip(emulate_chunk(**case, axpy=axpy, overflow="saturate"), ieee, strict=True):
            assert_same_bits(actual, expected)
