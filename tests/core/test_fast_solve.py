"""The triangular half of a chunk of the fast backend: chains of multiply-adds, garbage beside it, the verdict."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba.core.dims import FAST_CHUNK as C
from cgdr_numba.core.fast import simd, solve
from cgdr_numba.core.fast.solve import Triangle
from conftest import COMPILED
from emulation import fused_multiply_add

F32, F64 = np.float32, np.float64


@pytest.fixture(autouse=True)
def silent_overflow():
    """What means nothing may overflow."""
    with np.errstate(all="ignore"):
        yield


def triangle(n: int, columns: int, seed: int = 0, garbage: float = np.nan, size: float = 0.4) -> Triangle:
    """Random operands of n tokens; whatever has no meaning holds `garbage`."""
    rng = np.random.default_rng([seed, n, columns])
    width = -(-columns // 16) * 16
    b, m = np.full((2, C, C), garbage, F32)
    rows = np.full((4, C), garbage, F32)
    through, u = np.full((3 * C, width), garbage, F32), np.full((C, width), garbage, F32)
    for i in range(n):
        b[i, :i], m[i, : i + 1] = size * rng.standard_normal(i), rng.standard_normal(i + 1)
    rows[:, :n] = rng.uniform(0.1, 1, (4, n))
    through[: 2 * n, :columns], u[:n, :columns] = (
        rng.standard_normal((2 * n, columns)),
        rng.standard_normal((n, columns)),
    )
    return Triangle(b, m, *rows, through[: 2 * n, :columns], u[:n, :columns], np.full(width // 16, garbage, F32))


def copy(x: Triangle) -> Triangle:
    """Operands of their own, with the room around them."""
    through, u = ((page.base if page.base is not None else page).copy() for page in (x.through, x.u))
    n, columns = x.u.shape
    return x._replace(through=through[: 2 * n, :columns], u=u[:n, :columns])


def in_float64(x: Triangle) -> tuple[np.ndarray, np.ndarray]:
    """e^(G_last - G) U and O."""
    n = len(x.u)
    wide = [part.astype(F64) for part in x]
    b, m = np.tril(np.nan_to_num(wide[0][:n, :n]), -1), np.tril(np.nan_to_num(wide[1][:n, :n]))
    beta, pull, decay, rest = (row[:n, None] for row in wide[2:6])
    through, v = wide[6:8]
    u = np.linalg.solve(np.eye(n) - b, beta * v - pull * through[:n])
    return rest * u, decay * through[n:] + m @ u


def by_chains(x: Triangle) -> tuple[np.ndarray, np.ndarray]:
    """The same in float32, a multiply-add with one rounding a step (two where none is at hand), j ascending."""
    has_fma, n = simd.instruction_set().has_fma, len(x.u)

    def onto(a: Any, row: np.ndarray, total: np.ndarray) -> np.ndarray:
        return fused_multiply_add(np.full_like(row, a), row, total) if has_fma else a * row + total

    u, o = [], []
    for i in range(n):
        total = x.beta[i] * x.u[i] - x.pull[i] * x.through[i]
        for j in range(i):
            total = onto(x.b[i, j], u[j], total)
        u.append(total)
        total = x.decay[i] * x.through[n + i]
        for j in range(i + 1):
            total = onto(x.m[i, j], u[j], total)
        o.append(total)
    return x.rest[:n, None] * np.array(u), np.array(o)


@pytest.mark.parametrize("n", range(1, C + 1))
def test_against_float64(n: int) -> None:
    for columns in (1, 3, 16, 37):
        x = triangle(n, columns)
        u, o = in_float64(x)
        solve.solve(x)
        np.testing.assert_allclose(x.u, u, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(x.through[n:], o, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not COMPILED, reason="plain NumPy rounds products by themselves")
@pytest.mark.parametrize("n", range(1, C + 1))
def test_chains_round_once_a_step_with_j_ascending(n: int) -> None:
    for columns in (1, 15, 16, 50, 128):
        x = triangle(n, columns)
        u, o = by_chains(x)
        solve.solve(x)
        assert np.array_equal(x.u, u)
        assert np.array_equal(x.through[n:], o)


@pytest.mark.parametrize("garbage", [np.inf, 3e38, 0.0])
@pytest.mark.parametrize(("n", "columns"), [(1, 1), (5, 7), (13, 33), (16, 18)])
def test_what_has_no_meaning_does_not_matter(n: int, columns: int, garbage: float) -> None:
    x, y = triangle(n, columns), triangle(n, columns, garbage=garbage)
    solve.solve(x)
    solve.solve(y)
    assert np.array_equal(x.u, y.u)
    assert np.array_equal(x.through, y.through)


def test_columns_do_not_depend_on_their_mates() -> None:
    x = triangle(11, 70)
    parts = []
    for columns in (slice(0, 1), slice(5, 22), slice(64, 70)):
        some = triangle(11, columns.stop - columns.start)
        some.u[:], some.through[:] = x.u[:, columns], x.through[:, columns]
        some = some._replace(b=x.b, m=x.m, beta=x.beta, pull=x.pull, decay=x.decay, rest=x.rest)
        solve.solve(some)
        parts.append((columns, some))
    solve.solve(x)
    for columns, some in parts:
        assert np.array_equal(some.u, x.u[:, columns])
        assert np.array_equal(some.through[11:], x.through[11:, columns])


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("columns", [1, 16, 17, 50, 128])
def test_peaks_are_the_largest_of_u_in_every_16_columns(n: int, columns: int) -> None:
    x = triangle(n, columns)
    x.u[n // 2, columns - 1] = -1e9
    plain = x._replace(rest=np.ones(C, F32), u=x.u.copy(), through=x.through.copy())
    solve.solve(x)
    solve.plain_solve(plain)
    expected = [np.abs(plain.u[:, c : c + 16]).max() for c in range(0, columns, 16)]
    np.testing.assert_allclose(x.peaks, expected, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["u", "memory", "beta", "b"])
def test_peaks_show_what_is_not_finite(name: str, value: float) -> None:
    for n, columns, i, c in ((5, 7, 4, 6), (16, 40, 1, 39), (16, 40, 15, 3), (9, 17, 8, 16)):
        x = triangle(n, columns)
        if name == "u":
            x.u[i, c] = value
        elif name == "memory":
            x.through[i, c] = value
        elif name == "beta":
            x.beta[i] = value
        else:
            x.b[i, 0] = value
        solve.solve(x)
        bad = ~np.isfinite(x.peaks)
        of_one_column = np.arange(len(x.peaks)) == c // 16
        assert np.array_equal(bad, of_one_column if name in ("u", "memory") else np.ones_like(bad))
