"""q and k of some tokens made ready: normalised where asked, q scaled, and their products k . q.

A sum over Dk runs over vectors with d ascending in every lane, the lanes are added by halves, and what is left behind
the last full vector is summed in order and added: the bits depend on Dk and the vectors' width alone.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cgdr_numba.core.fast.simd import FLOAT, INDEX, Lanes, instruction_set
from cgdr_numba.core.jit import kernel
from cgdr_numba.core.l2norm import L2NORM_EPS

F32Array = NDArray[np.float32]


class _Pair:
    """Emits one token."""

    def __init__(self, builder: Any, rows: tuple[Any, Any], n_columns: Any) -> None:
        self.builder, self.rows = builder, rows
        wide, single = Lanes(builder, instruction_set().lanes), Lanes(builder, 1)
        n_vectors = builder.sdiv(n_columns, INDEX(wide.n))
        tail = builder.mul(n_vectors, INDEX(wide.n))
        self.parts = [(wide, INDEX(0), n_vectors), (single, tail, n_columns)]

    def sums(self, step: Any, n_sums: int) -> list[Any]:
        """Sums over Dk of the products of the pairs of vectors that step(lanes, place) returns."""
        builder, totals = self.builder, []
        for lanes, start, end in self.parts:
            places = [lanes.variable() for _ in range(n_sums)]
            with cgutils.for_range(builder, end, start=start) as loop:
                for (a, b), place in zip(step(lanes, builder.mul(loop.index, INDEX(lanes.n))), places, strict=True):
                    builder.store(lanes.multiply_add(a, b, builder.load(place)), place)
            totals.append([lanes.sum(builder.load(place)) for place in places])
        return [*map(builder.fadd, *totals)]

    def squares(self, lanes: Lanes, place: Any) -> list[tuple[Any, Any]]:
        """Steps of q . q and k . k."""
        values = [lanes.load(row, place) for row in self.rows]
        return [(value, value) for value in values]

    def scaled(self, factors: list[Any]) -> Any:
        """Put rows times their factors; returns a function for the steps of their product."""

        def step(lanes: Lanes, place: Any) -> list[tuple[Any, Any]]:
            q, k = (
                self.builder.fmul(lanes.splat(factor), lanes.load(row, place))
                for factor, row in zip(factors, self.rows, strict=True)
            )
            lanes.store(q, self.rows[0], place)
            lanes.store(k, self.rows[1], place)
            return [(k, q)]

        return step


def _inverse_length(builder: Any, square: Any, numerator: Any) -> Any:
    """Return numerator / sqrt(square + 1e-6)."""
    kind = ir.FunctionType(FLOAT, [FLOAT])
    root = cgutils.get_or_insert_function(builder.module, kind, "llvm.sqrt.f32")
    eps = ir.Constant(FLOAT, float(np.float32(L2NORM_EPS)))
    return builder.fdiv(numerator, builder.call(root, [builder.fadd(square, eps)]))


@intrinsic  # type: ignore[untyped-decorator]
def _emit_pairs(_typing_context: Any, operands: Any) -> Any:
    """Over (q, k, normalise, scale, kq)."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        q, k, normalise, scale, kq = cgutils.unpack_tuple(builder, values[0])
        q, k, kq = (context.make_array(operands[i])(context, builder, value) for i, value in ((0, q), (1, k), (4, kq)))
        is_normalised = builder.icmp_unsigned("!=", normalise, ir.Constant(normalise.type, 0))
        n_rows, n_columns = cgutils.unpack_tuple(builder, q.shape)
        strides = [builder.sdiv(builder.extract_value(x.strides, 0), INDEX(4)) for x in (q, k)]
        with cgutils.for_range(builder, n_rows) as loop:
            rows = [
                builder.gep(x.data, [builder.mul(loop.index, stride)])
                for x, stride in zip((q, k), strides, strict=True)
            ]
            pair = _Pair(builder, (rows[0], rows[1]), n_columns)
            plain = [scale, ir.Constant(FLOAT, 1.0)]
            factors = [cgutils.alloca_once_value(builder, value) for value in plain]
            for value, place in zip(plain, factors, strict=True):
                builder.store(value, place)
            with builder.if_then(is_normalised):
                for square, value, place in zip(pair.sums(pair.squares, 2), plain, factors, strict=True):
                    builder.store(_inverse_length(builder, square, value), place)
            (product,) = pair.sums(pair.scaled([builder.load(place) for place in factors]), 1)
            builder.store(product, builder.gep(kq.data, [loop.index]))
        return context.get_dummy_value()

    return types.void(operands), generate


@kernel
def _compiled_pairs(q: F32Array, k: F32Array, normalise: bool, scale: np.float32, kq: F32Array) -> None:
    """Make q, k and kq ready; the intrinsic behind an ordinary call."""
    _emit_pairs((q, k, normalise, scale, kq))


def plain_pairs(q: F32Array, k: F32Array, normalise: bool, scale: np.float32, kq: F32Array) -> None:
    """Make q, k and kq ready, by NumPy."""
    if normalise:
        eps = np.float32(L2NORM_EPS)
        q *= (scale / np.sqrt((q * q).sum(axis=1) + eps))[:, np.newaxis]
        k *= (np.float32(1.0) / np.sqrt((k * k).sum(axis=1) + eps))[:, np.newaxis]
    else:
        q *= scale
    kq[: len(q)] = (k * q).sum(axis=1)


prepare_pairs = plain_pairs if numba.config.DISABLE_JIT else _compiled_pairs
"""q [m, n] = scale q / sqrt(q . q + 1e-6) and k [m, n] = k / sqrt(k . k + 1e-6), without the roots where not
normalised, in place; kq [m] = k . q of the rows as they are then."""
