"""The Ascend 310P ChunkGatedDeltaRule kernel, re-enacted number by number in plain NumPy.

Written from the kernel's description alone, independent of the package under test. Every operation is an
element-wise float32 `+`, `-`, `*` or `/`: one rounding each, and no library's summation order. Loops run over
the reduction index in the kernel's ascending order; rows that use the same index are taken together.

Conventions where the kernel's description is silent:

* Vector `Exp(x)` is float32(exp(x) taken in float64); overflow gives inf, -inf gives 0, NaN stays NaN.
* `ScalarExp` caps its halvings at 130, so an infinite argument gives the limit (inf or 0); NaN propagates.
* `axpy="two-roundings"` is fl(y + fl(a*x)), `"fused"` rounds a*x + y once. Only Axpy is ever fused.
* `overflow="saturate"` acts on every vector result (NaN -> 0, +-inf -> +-float32 max): in reductions on each
  pair sum, in a two-roundings Axpy on product and sum. The final casts clamp to the target's largest number.
  Scalar results are left alone: the prefix sum, the scalar part of a dot, `-dot * decay`, `dot * decay`, the
  coefficients of Steps 5 and 7, ScalarExp. Widening an input never saturates. The complete prefix sum passes
  the vector pipe once (Muls by 1), so it is saturated there, lane by lane.
* Rows of Q * scale (Phase 3.5) and V * beta (Step 1) are vector results whichever way they were loaded.

Shapes: L rows of the chunk, Dk, Dv widths of keys and values. D's upper triangle is NaN: nothing reads it.
"""

import math

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Rows = tuple[Float32, ...]

CHUNK = GROUP = 64
MAX_HALVINGS, EXP_TERMS = 130, 12
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
FLOAT32_MAX = np.finfo(np.float32).max
LARGEST = {"float16": np.float32(65504), "bfloat16": np.float32((2 - 2**-7) * 2.0**127)}


def saturate(x: Float32, largest: np.float32 = FLOAT32_MAX) -> Float32:
    """NaN -> 0, anything beyond +-largest -> +-largest."""
    return np.where(np.isnan(x), ZERO, np.clip(x, -largest, largest))


def fused_multiply_add(a: Float32, x: Float32, y: Float32) -> Float32:
    """a*x + y rounded once to float32.

    The float64 product is exact (48 bits). The sum is rounded to odd: TwoSum gives its error, an
    inexact sum is cut towards zero and its last bit set. That bit can neither hide nor feign a tie, so the
    conversion rounds as if from the exact value, subnormals and overflow included.
    """
    product = np.asarray(a, np.float64) * np.asarray(x, np.float64)
    addend = np.asarray(y, np.float64)
    total = product + addend
    of_addend = total - product
    error = (product - (total - of_addend)) + (addend - of_addend)
    inexact = (error != 0) & np.isfinite(total)
    beyond = inexact & (np.signbit(error) != np.signbit(total))
    odd = (total.view(np.int64) - beyond) | inexact
    return odd.view(np.float64).astype(np.float32)


def scalar_exp(x: np.float32) -> np.float32:
    """ScalarExp: halve |x| to at most 1 (k times, capped), 12 Taylor terms, square k times, invert for x < 0.

    a = |x| / 2^k; t = fl(t * fl(a/i)); r = fl(r + t); k times r = fl(r*r); r = fl(1/r) if x < 0.
    """
    a, halvings = abs(x), 0
    while a > ONE and halvings < MAX_HALVINGS:
        a, halvings = a * HALF, halvings + 1
    r = t = ONE
    for i in range(1, EXP_TERMS + 1):
        t = t * (a / np.float32(i))
        r = r + t
    for _ in range(halvings):
        r = r * r
    return ONE / r if x < ZERO else r


class VectorPipe:
    """The vector instructions, with the two open questions (Axpy's rounding, overflow) answered once."""

    def __init__(self, axpy: str, overflow: str) -> None:
        if axpy not in ("two-roundings", "fused") or overflow not in ("ieee", "saturate"):
            raise ValueError(f"unknown option in axpy={axpy!r}, overflow={overflow!r}")
        self.fuses = axpy == "fused"
        self.saturates = overflow == "saturate"

    def settle(self, x: Float32) -> Float32:
        """What the vector pipe writes for the float32 result x."""
        return saturate(x) if self.saturates else x

    def mul(self, a: Float32, b: Float32 | np.float32) -> Float32:
        """Mul, Muls: fl(a * b)."""
        return self.settle(a * b)

    def add(self, a: Float32, b: Float32) -> Float32:
        """Add: fl(a + b)."""
        return self.settle(a + b)

    def sub(self, a: Float32, b: Float32) -> Float32:
        """Sub: fl(a - b)."""
        return self.settle(a - b)

    def exp(self, x: Float32) -> Float32:
        """Exp: float32 of the float64 exponential; above 100 float32 has long overflowed."""
        values = [math.inf if value > 100.0 else math.exp(value) for value in x.ravel().tolist()]
        return self.settle(np.array(values, np.float32).reshape(x.shape))

    def axpy(self, y: Float32, a: Float32, x: Float32) -> Float32:
        """Axpy: fl(y + fl(a*x)), or fl(y + a*x) when fused."""
        if self.fuses:
            return self.settle(fused_multiply_add(a, x, y))
        return self.add(y, self.mul(a, x))

    def whole_reduce_sum(self, groups: Float32) -> Float32:
        """WholeReduceSum over the last axis: a binary tree of adjacent pairs, (p0+p1), (p2+p3), ..."""
        while groups.shape[-1] > 1:
            groups = self.add(groups[..., 0::2], groups[..., 1::2])
        return groups[..., 0]

    def dots(self, a: Float32, b: Float32) -> Float32:
        """DotFp32 of every row of a with every row of b: [La, Dk], [Lb, Dk] -> [La, Lb].

        p_d = fl(a_d * b_d); full groups of 64 by the tree; then scalar: s = 0, s = fl(s + group) in order,
        s = fl(s + p_d) one by one over the tail.
        """
        products = self.mul(a[:, None, :], b[None, :, :])
        n_groups = a.shape[1] // GROUP
        grouped = products[..., : n_groups * GROUP].reshape(*products.shape[:2], n_groups, GROUP)
        s = np.zeros(products.shape[:2], np.float32)
        for group in range(n_groups):
            s = s + self.whole_reduce_sum(grouped[:, :, group])
        for d in range(n_groups * GROUP, a.shape[1]):
            s = s + products[..., d]
        return s

    def accumulate(self, y: Float32, coef: Float32, rows: Float32, *, causal: bool) -> Float32:
        """y[i] = axpy(y[i], coef[i][k], rows[k]) for k ascending; causal: only k = 0..i."""
        y = y.copy()
        for k in range(len(rows)):
            first = k if causal else 0
            y[first:] = self.axpy(y[first:], coef[first:, k, None], rows[k])
        return y


def phase_1b(pipe: VectorPipe, g: Float32) -> Float32:
    """G[i] = fl(G[i-1] + g_i) from 0 by scalars; the complete sum passes the vector pipe (Muls by 1)."""
    g_cum = np.zeros_like(g)
    for i in range(len(g)):
        g_cum[i] = (g_cum[i - 1] if i else ZERO) + g[i]
    return pipe.mul(g_cum, ONE)


def phase_2(pipe: VectorPipe, k: Float32, beta: Float32) -> Float32:
    """KB[i] = fl(K[i] * beta_i)."""
    return pipe.mul(k, beta[:, None])


def phase_3(pipe: VectorPipe, g_cum: Float32) -> tuple[Float32, Float32]:
    """E[i] = Exp(G[i]) and, for j <= i, D[i][j] = Exp(fl(G[i] - G[j]))."""
    rows, columns = np.tril_indices(len(g_cum))
    decay = np.full((len(g_cum), len(g_cum)), np.nan, np.float32)
    decay[rows, columns] = pipe.exp(pipe.sub(g_cum[rows], g_cum[columns]))
    return pipe.exp(g_cum), decay


def phase_3_5(pipe: VectorPipe, q: Float32, scale: np.float32) -> Float32:
    """QS[i] = fl(Q[i] * scale), the same numbers from the cache and from the slow path."""
    return pipe.mul(q, scale)


def phase_4a(pipe: VectorPipe, kb: Float32, k: Float32, decay: Float32) -> Float32:
    """For j < i: Bm[i][j] = fl(-dot(KB[i], K[j]) * D[i][j]), a scalar product."""
    return -pipe.dots(kb, k) * decay


def phase_4b_4c(pipe: VectorPipe, bm: Float32) -> Float32:
    """A[i] = Bm[i], then A[i][:k] = axpy(A[i][:k], Bm[i][k], A[k][:k]) for k = 1..i-1; last, A[i][i] = 1."""
    a = bm.copy()  # row k is final once all k' < k are done, so step k serves every row below it at once
    for k in range(1, len(bm) - 1):
        a[k + 1 :, :k] = pipe.axpy(a[k + 1 :, :k], bm[k + 1 :, k, None], a[k, :k])
    np.fill_diagonal(a, ONE)
    return a


def phase_4d(pipe: VectorPipe, qs: Float32, k: Float32, decay: Float32) -> Float32:
    """For j <= i: M[i][j] = fl(dot(QS[i], K[j]) * D[i][j]), a scalar product."""
    return pipe.dots(qs, k) * decay


def phase_5(pipe: VectorPipe, a: Float32, kb: Float32, e: Float32) -> Float32:
    """KB[i] = fl(KB[i] * E[i]); KC[i] = 0, then axpy(KC[i], A[i][k], KB[k]) for k = 0..i."""
    kb = pipe.mul(kb, e[:, None])
    return pipe.accumulate(np.zeros_like(kb), a, kb, causal=True)


def step_1(pipe: VectorPipe, v: Float32, beta: Float32) -> Float32:
    """VB[i] = fl(V[i] * beta_i)."""
    return pipe.mul(v, beta[:, None])


def step_2(pipe: VectorPipe, a: Float32, vb: Float32) -> Float32:
    """U[i] = 0, then axpy(U[i], A[i][k], VB[k]) for k = 0..i."""
    return pipe.accumulate(np.zeros_like(vb), a, vb, causal=True)


def step_3(initial_state: npt.NDArray) -> Float32:
    """S[d][v] = float32(initial_state[v][d]) at the first chunk; later chunks go on with the float32 S."""
    return initial_state.T.astype(np.float32)


def step_4(pipe: VectorPipe, u: Float32, kc: Float32, state: Float32) -> Float32:
    """W[i] = 0, then axpy(W[i], KC[i][d], S[d]) for all d; VN[i] = fl(U[i] + fl(W[i] * -1))."""
    w = pipe.accumulate(np.zeros_like(u), kc, state, causal=False)
    return pipe.add(u, pipe.mul(w, -ONE))


def step_5(pipe: VectorPipe, q: Float32, scale: np.float32, e: Float32, state: Float32) -> Float32:
    """O[i] = 0, then axpy(O[i], fl(fl(q_id * scale) * E[i]), S[d]) for all d; the coefficient is a scalar."""
    o = np.zeros((len(q), state.shape[1]), np.float32)
    return pipe.accumulate(o, (q * scale) * e[:, None], state, causal=False)


def step_6(pipe: VectorPipe, o: Float32, m: Float32, vn: Float32) -> Float32:
    """O[i] = axpy(O[i], M[i][j], VN[j]) for j = 0..i, into Step 5's accumulator."""
    return pipe.accumulate(o, m, vn, causal=True)


def step_7(pipe: VectorPipe, k: Float32, g_cum: Float32, e: Float32, state: Float32, vn: Float32) -> Float32:
    """S = fl(S * E_last); for each i: S[d] = axpy(S[d], fl(k_id * ScalarExp(fl(G_last - G_i))), VN[i])."""
    state = pipe.mul(state, e[-1])
    for i in range(len(k)):
        coef = k[i] * scalar_exp(g_cum[-1] - g_cum[i])
        state = pipe.axpy(state, coef[:, None], vn[i])
    return state


def chunk(pipe: VectorPipe, rows: Rows, scale: np.float32, state: Float32) -> tuple[Float32, Float32]:
    """One chunk of one value head: (q, k, v, beta, g) rows and S [Dk, Dv] -> O [L, Dv], the next S."""
    q, k, v, beta, g = rows
    g_cum = phase_1b(pipe, g)
    kb = phase_2(pipe, k, beta)
    e, decay = phase_3(pipe, g_cum)
    qs = phase_3_5(pipe, q, scale)
    a = phase_4b_4c(pipe, phase_4a(pipe, kb, k, decay))
    m = phase_4d(pipe, qs, k, decay)
    kc = phase_5(pipe, a, kb, e)
    u = step_2(pipe, a, step_1(pipe, v, beta))
    vn = step_4(pipe, u, kc, state)
    o = step_6(pipe, step_5(pipe, q, scale, e, state), m, vn)
    return o, step_7(pipe, k, g_cum, e, state, vn)


def narrow(pipe: VectorPipe, x: Float32, dtype: np.dtype) -> npt.NDArray:
    """The final cast, to nearest even; saturating, it clamps to the largest finite number of the target."""
    if pipe.saturates:
        x = saturate(x, LARGEST.get(dtype.name, FLOAT32_MAX))
    return x.astype(dtype)


@np.errstate(all="ignore")
def emulate_chunk(
    query: npt.NDArray,
    key: npt.NDArray,
    value: npt.NDArray,
    *,
    beta: npt.NDArray,
    initial_state: npt.NDArray,
    lengths: npt.ArrayLike,
    scale: float = 1.0,
    g: npt.NDArray | None = None,
    axpy: str = "two-roundings",
    overflow: str = "ieee",
) -> tuple[npt.NDArray, npt.NDArray]:
    """The whole operator -> (out [T, Nv, Dv] in query's dtype, final_state in initial_state's dtype).

    query, key [T, Nk, Dk], value [T, Nv, Dv], beta, g [T, Nv], initial_state [B, Nv, Dv, Dk], lengths [B].
    All become float32 once: exact from half and bfloat16, to nearest even from float64. g None means
    zeros. A sequence of length 0 copies its initial state unchanged. Conventions: the module's docstring.
    """
    pipe = VectorPipe(axpy, overflow)
    n_heads = value.shape[1]
    heads_per_key = max(n_heads // query.shape[1], 1)
    q, k, v, b = (x.astype(np.float32) for x in (query, key, value, beta))
    log_decay = np.zeros_like(b) if g is None else g.astype(np.float32)
    out = np.zeros(value.shape, query.dtype)
    final_state = initial_state.copy()
    stop = 0
    for sequence, length in enumerate(np.asarray(lengths).tolist()):
        start, stop = stop, stop + length
        for head in range(n_heads if length else 0):
            qk_head = head // heads_per_key
            state = step_3(initial_state[sequence, head])
            for first in range(start, stop, CHUNK):
                at = slice(first, min(first + CHUNK, stop))
                rows = (q[at, qk_head], k[at, qk_head], v[at, head], b[at, head], log_decay[at, head])
                o, state = chunk(pipe, rows, np.float32(scale), state)
                out[at, head] = narrow(pipe, o, out.dtype)
            final_state[sequence, head] = narrow(pipe, state.T, final_state.dtype)
    return out, final_state
