"""The Ascend 310P RecurrentGatedDeltaRule kernel, re-enacted number by number in plain NumPy.

Written from the kernel's description alone, independent of the package under test. Every operation is an element-wise
float32 operation with one rounding, over lanes d of a row for vector instructions and over rows v for what the kernel
does row after row; rows do not see one another. Conventions where the description is silent are those of `emulation`,
and further:

* Dots run over Dk rounded up to 16 lanes, and lanes behind Dk are zeros.
* `overflow="saturate"` acts on vector results: Q * scale, Exp, the decays of S, k * delta and its addition, the
  products and pair sums of dots. The scalar part of a dot and delta are left alone. Casts clamp.
"""

import numpy as np
import numpy.typing as npt

from emulation import VectorPipe, narrow

Float32 = npt.NDArray[np.float32]


def padded(x: npt.NDArray, width: int) -> Float32:
    """The rows in float32 with zeros up to `width`."""
    wide = np.zeros((*x.shape[:-1], width), np.float32)
    wide[..., : x.shape[-1]] = x.astype(np.float32)
    return wide


def token(
    pipe: VectorPipe, state: Float32, rows: tuple[Float32, ...], beta: np.float32, decays: list[Float32 | np.float32]
) -> tuple[Float32, Float32]:
    """One token on S [Dv, lanes]: (q, k, v) rows, q scaled -> o [Dv] and the next S.

    S = fl(S * decay) for each decay; m = dot(S[v], k); delta = fl(fl(v - m) * beta); S[v] = fl(S[v] + fl(k * delta));
    o = dot(S[v], q).
    """
    q, k, v = rows
    for decay in decays:
        state = pipe.mul(state, decay)
    delta = (v - pipe.dots(state, k[None])[:, 0]) * beta
    state = pipe.add(state, pipe.mul(k[None], delta[:, None]))
    return pipe.dots(state, q[None])[:, 0], state


@np.errstate(all="ignore")
def emulate_recurrent(
    query: npt.NDArray,
    key: npt.NDArray,
    value: npt.NDArray,
    state: npt.NDArray,
    *,
    beta: npt.NDArray,
    lengths: npt.ArrayLike,
    slots: npt.ArrayLike,
    accepted: npt.ArrayLike | None = None,
    g: npt.NDArray | None = None,
    gk: npt.NDArray | None = None,
    scale: float = 1.0,
    overflow: str = "ieee",
) -> tuple[npt.NDArray, npt.NDArray]:
    """The whole operator -> (out [T, Nv, Dv] in query's dtype, the pool after it); `state` is left alone.

    query, key [T, Nk, Dk], value [T, Nv, Dv], beta, g [T, Nv], gk [T, Nv] or [T, Nv, Dk], state [slots, Nv, Dv, Dk],
    lengths, accepted [B], slots [T]; -1 for padding.
    """
    pipe = VectorPipe("two-roundings", overflow)
    n_heads, dk = value.shape[1], query.shape[2]
    heads_per_key, lanes = n_heads // query.shape[1], -(-dk // 16) * 16
    scalar_gk = gk is not None and gk.ndim == 2
    out, pool, before = np.zeros(value.shape, query.dtype), state.copy(), state
    indices, stop = np.asarray(slots).tolist(), 0
    for sequence, length in enumerate(np.asarray(lengths).tolist()):
        start, stop = stop, stop + length
        if length == 0 or indices[start] < 0:
            continue
        count = 1 if accepted is None else np.asarray(accepted).tolist()[sequence]
        for head in range(n_heads):
            s = padded(before[indices[start + count - 1], head], lanes)
            for t in range(start, stop):
                q = pipe.mul(padded(query[t, head // heads_per_key], lanes), np.float32(scale))
                k = padded(key[t, head // heads_per_key], lanes)
                decays: list[Float32 | np.float32] = []
                if g is not None:
                    decays.append(pipe.exp(g[t, head : head + 1].astype(np.float32))[0])
                if gk is not None and scalar_gk and g is None:
                    decays.append(pipe.exp(gk[t, head : head + 1].astype(np.float32))[0])
                if gk is not None and not scalar_gk:
                    decays.append(pipe.exp(padded(gk[t, head], lanes)))
                rows = (q, k, value[t, head].astype(np.float32))
                o, s = token(pipe, s, rows, np.float32(beta[t, head]), decays)
                # Pad lanes hold 0 whatever the decays: there is no number to be lost there.
                s[:, dk:] = 0
                out[t, head] = narrow(pipe, o, out.dtype)
                pool[indices[t], head] = narrow(pipe, s[:, :dk], pool.dtype)
    return out, pool
