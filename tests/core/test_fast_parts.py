"""The fast backend's parts, one at a time: conversions, passes over a state, the register tile, instruction sets."""

import re
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir

from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import KINDS, as_words
from cgdr_numba.core.fast import convert, k_first, microkernel, simd, v_first
from conftest import COMPILED

F32 = np.float32


@pytest.fixture(autouse=True)
def silent_overflow():
    """Random bits overflow."""
    with np.errstate(all="ignore"):
        yield


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("step", [1, 3, -1])
def test_rows_are_converted_exactly_and_rounded_to_nearest_even(dtype: Any, step: int, n_examples: int) -> None:
    n, kind = n_examples + 5, KINDS[np.dtype(dtype)]
    bits = np.random.default_rng(1).integers(0, 2**32, n, dtype=np.uint32)
    half = np.arange(n, dtype=np.uint32) % 0x7C00
    ties = ((half.astype(np.uint16).view(np.float16).astype(np.float64)) * (1 + 2.0**-11)).astype(F32)
    for values in (bits.view(F32), (bits << 16).view(F32), ties, np.nextafter(ties, F32(9))):
        target = np.zeros(n * abs(step), dtype)[::step]
        convert.narrow_row(values, kind, as_words(target))
        np.testing.assert_array_equal(target.astype(np.float64), values.astype(dtype).astype(np.float64))
        back = np.full(n, np.nan, F32)
        convert.widen_row(as_words(target), kind, back)
        np.testing.assert_array_equal(back, target.astype(F32))


@pytest.mark.parametrize(("dk", "n"), [(1, 1), (5, 37), (7, 1), (37, 5), (64, 130), (128, 128), (130, 18)])
def test_passes_over_a_state_of_keys(dk: int, n: int) -> None:
    passes = k_first.passes
    state = np.pad(random(dk, n), [(0, 0), (0, 3)])[:, :n]
    k, q, k_next, q_next = random(4, dk, seed=1)
    delta, decay = random(n, seed=2), F32(0.7)
    m, p, m_fused, p_fused = np.full((4, n), np.nan, F32)
    s = state.astype(np.float64)

    passes.read(state, k, q, m, p)
    np.testing.assert_allclose(m, s.T @ k, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(p, s.T @ q, rtol=1e-4, atol=1e-4)

    updated = np.full_like(state, np.nan)
    passes.update(state, decay, k, delta, updated)
    expected = decay * s + np.outer(k, delta)
    np.testing.assert_allclose(updated, expected, rtol=1e-5, atol=1e-5)

    passes.read(updated, k_next, q_next, m, p)
    in_place = state.copy()
    passes.update_and_read(in_place, decay, k, delta, k_next, q_next, in_place, m_fused, p_fused)
    assert np.array_equal(in_place, updated), "both halves at once have the bits of one after the other"
    assert np.array_equal(m_fused, m)
    assert np.array_equal(p_fused, p)


def row_tokens(state: np.ndarray, n_tokens: int, n: int, dk: int) -> v_first.RowTokens:
    """Tokens for a state [n, Dk], in rows that have room for whole vectors where scratch has it."""
    k, q = (padded(n_tokens, dk, seed) for seed in (1, 2))
    gates = [np.abs(random(n_tokens, seed=seed)) / 3 for seed in (4, 5)]
    return v_first.RowTokens(state, k, q, (k * q).sum(axis=1), *gates, padded(n_tokens, n, 3), state)


def rows_by_definition(x: v_first.RowTokens) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the state in float64."""
    s, outputs = x.state.astype(np.float64), []
    for k, q, decay, beta, value in zip(x.k, x.q, x.decay, x.beta, x.values, strict=True):
        s = s * float(decay)
        s += np.outer(float(beta) * (value.astype(np.float64) - s @ k), k.astype(np.float64))
        outputs.append(s @ q)
    return np.array(outputs), s


@pytest.mark.parametrize("n_tokens", [1, 2, 5])
@pytest.mark.parametrize(("dk", "n"), [(1, 1), (5, 37), (7, 1), (37, 5), (64, 130), (128, 128), (128, 13), (130, 18)])
def test_tokens_over_a_state_of_values(dk: int, n: int, n_tokens: int) -> None:
    x = row_tokens(np.pad(random(n, dk), [(0, 0), (0, 3)])[:, :dk], n_tokens, n, dk)
    outputs, state = rows_by_definition(x)
    start, values = x.state.copy(), x.values.copy()
    v_first.run_rows(x)
    np.testing.assert_allclose(x.values, outputs, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(x.state, state, rtol=1e-4, atol=1e-4)

    apart = x._replace(source=start, values=values.copy(), state=np.full((n, dk), np.nan, F32))
    v_first.run_rows(apart)
    assert np.array_equal(apart.state, x.state), "where rows come from changes no bit"
    assert np.array_equal(apart.values, x.values)

    for i in range(n_tokens):
        one = slice(i, i + 1)
        parts = {name: getattr(x, name)[one] for name in ("k", "q", "kq", "decay", "beta")}
        v_first.run_rows(v_first.RowTokens(start, **parts, values=values[one], state=start))
    assert np.array_equal(start, x.state), "a run may be cut at any token"
    assert np.array_equal(values, x.values)


@pytest.mark.parametrize("dk", [50, 128])
def test_rows_do_not_depend_on_their_mates(dk: int) -> None:
    """Rows of a block and single rows have the same bits."""
    x = row_tokens(random(21, dk), 3, 21, dk)
    start, values = x.state.copy(), x.values.copy()
    v_first.run_rows(x)
    for rows in (slice(0, 1), slice(3, 20), slice(13, 21)):
        mine = start[rows].copy()
        part = x._replace(source=mine, values=values[:, rows].copy(), state=mine)
        v_first.run_rows(part)
        assert np.array_equal(part.state, x.state[rows])
        assert np.array_equal(part.values, x.values[:, rows])


def test_columns_do_not_depend_on_their_mates() -> None:
    """Every column is one chain: vectors of any width and single columns give it the same bits."""
    state, (k, q) = random(50, 131), random(2, 50)
    m, p = np.full((2, 131), np.nan, F32)
    k_first.read(state, k, q, m, p)
    for columns in (slice(0, 1), slice(3, 20), slice(60, 131)):
        part = np.full((2, columns.stop - columns.start), np.nan, F32)
        k_first.read(state[:, columns], k, q, *part)
        assert np.array_equal(part, np.stack([m[columns], p[columns]]))


def padded(m: int, n: int, seed: int) -> np.ndarray:
    """A random [m, n] whose rows have room for whole vectors, the room being NaN."""
    width = -(-n // microkernel.lanes()) * microkernel.lanes()
    array = memory.empty((m, width), F32)
    array[:, n:] = np.nan
    array[:, :n] = random(m, n, seed=seed)
    return array[:, :n]


SHAPES = [(64, 128, 128), (128, 64, 128), (128, 128, 64), (64, 64, 128), (63, 127, 127), (17, 33, 50), (1, 5, 3)]
SHAPES += [(m, 3, 20) for m in range(1, 18)]


@pytest.mark.parametrize(("m", "depth", "n"), SHAPES)
def test_products(m: int, depth: int, n: int) -> None:
    a, b, c, alpha = padded(m, depth, 0), padded(depth, n, 1), padded(m, n, 2), random(m)
    start, product = c.copy(), a.astype(np.float64) @ b
    limits = {"rtol": 1e-4, "atol": 1e-4}
    microkernel.multiply(a, b, c)
    np.testing.assert_allclose(c, product, **limits)
    once = c.copy()
    microkernel.multiply(np.asfortranarray(a), b, c)
    assert np.array_equal(c, once), "a transposed left side changes no bit"
    c[:] = start
    microkernel.multiply_onto(a, b, c)
    np.testing.assert_allclose(c, start + product, **limits)
    c[:] = start
    microkernel.multiply_onto_scaled(a, b, alpha, c)
    np.testing.assert_allclose(c, alpha[:, np.newaxis] * start + product, **limits)


def test_every_output_is_one_chain_wherever_it_lies() -> None:
    """Any block of rows and columns multiplied by itself has the bits that it has in the whole."""
    a, b, c = padded(61, 70, 0), padded(70, 90, 1), padded(61, 90, 2)
    microkernel.multiply(a, b, c)
    for rows, columns in ((slice(0, 1), slice(0, 90)), (slice(7, 20), slice(16, 33)), (slice(60, 61), slice(89, 90))):
        part_b = padded(70, columns.stop - columns.start, 3)
        part_b[:] = b[:, columns]
        part = padded(rows.stop - rows.start, columns.stop - columns.start, 4)
        microkernel.multiply(a[rows], part_b, part)
        assert np.array_equal(part, c[rows, columns])


@pytest.mark.skipif(not COMPILED, reason="plain NumPy rounds products by themselves")
def test_chains_round_once_a_step_with_k_ascending() -> None:
    a, b = padded(3, 40, 0), padded(40, 5, 1)
    c = padded(3, 5, 2)
    microkernel.multiply(a, b, c)
    from emulation import fused_multiply_add

    for i, j in np.ndindex(3, 5):
        total = F32(0)
        for k in range(40):
            exact = fused_multiply_add(np.array([a[i, k]]), np.array([b[k, j]]), np.array([total]))[0]
            total = exact if simd.instruction_set().has_fma else total + a[i, k] * b[k, j]
        assert c[i, j] == total


TARGETS = [
    ("x86_64-unknown-linux-gnu", "znver4", "avx512"),
    ("x86_64-unknown-linux-gnu", "sapphirerapids", "avx512"),
    ("x86_64-unknown-linux-gnu", "haswell", "avx2"),
    ("x86_64-unknown-linux-gnu", "x86-64", "generic"),
    ("aarch64-unknown-linux-gnu", "neoverse-n1", "neon"),
]


def machine_for(triple: str, cpu: str) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)


@pytest.mark.parametrize(("triple", "cpu", "name"), TARGETS)
def test_instruction_sets_are_recognised(triple: str, cpu: str, name: str) -> None:
    assert simd.instruction_set_of(machine_for(triple, cpu)).name == name


@pytest.mark.parametrize("start", [microkernel.FROM_ZERO, microkernel.FROM_C, microkernel.FROM_SCALED_C])
def test_the_tile_compiles_for_arm(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """Vector fmla in the loop, and no call of a library's fma."""
    for module in (simd, microkernel):
        monkeypatch.setattr(module, "instruction_set", lambda: simd.NEON)
    names = ("a", "b", "c", "alpha", "a_row", "a_depth", "b_row", "c_row", "m", "n", "depth")
    kinds = [simd.FLOAT.as_pointer()] * 4 + [simd.INDEX] * 7
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    microkernel._emit_product(builder, dict(zip(names, function.args, strict=True)), start)
    builder.ret_void()
    machine = machine_for("aarch64-unknown-linux-gnu", "neoverse-n1")
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    code = machine.emit_assembly(parsed)
    rows, vectors = microkernel.TILE["neon"]
    assert len(re.findall(r"fmla\s+v\d+\.4s", code)) >= rows * vectors
    assert not re.search(r"\bbl\s", code)
