"""Named workloads: tests, benchmarks and the command line mean the same data by the same name."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.core.dims import Dims
from cgdr_numba.core.memory import empty


@dataclass(frozen=True, slots=True)
class Workload:
    """A chunked call by its sizes."""

    name: str
    lengths: tuple[int, ...]
    """Tokens of each packed sequence [N]."""
    hk: int
    hv: int
    dk: int = 128
    dv: int = 128

    @property
    def dims(self) -> Dims:
        """The sizes as the planner takes them."""
        return Dims(sum(self.lengths), len(self.lengths), self.hk, self.hv, self.dk, self.dv)

    @property
    def flops(self) -> int:
        """6 T Hv Dk Dv: what no chunking removes (K S, Q S and the state's update)."""
        return 6 * sum(self.lengths) * self.hv * self.dk * self.dv


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("P1", (512,), 2, 4),
        Workload("P2", (2048,), 16, 32),
        Workload("P3", (4096,), 16, 16),
        Workload("P4", (2048, 8, 1, 700, 64, 63, 129, 300), 4, 8),
        Workload("latency-1x8x64x64", (64,), 8, 8, 64, 64),
        Workload("latency-1x16x128x128", (128,), 16, 16),
        Workload("latency-1x1x128x256", (128,), 1, 1, 128, 256),
        Workload("latency-2x8x512x128", (512, 512), 8, 8),
        Workload("latency-1x16x1024x128", (1024,), 16, 16),
        Workload("latency-1x16x2048x128", (2048,), 16, 16),
    )
}
"""P1 to P4 are prefills of models (P2 is a layer of Qwen3-Next 80B); the others are the kernel's own latency shapes."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A recurrent call by its sizes: B states, T tokens each."""

    name: str
    batch: int
    n_tokens: int
    hk: int = 16
    hv: int = 32
    dk: int = 128
    dv: int = 128

    @property
    def flops(self) -> int:
        """Three multiply-adds for every element of the state and token: S^T k, the update, S^T q."""
        return 6 * self.batch * self.n_tokens * self.hv * self.dk * self.dv

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 states."""
        return 4 * self.batch * self.hv * self.dk * self.dv


DECODES: Final = {decode.name: decode for decode in (Decode("D1", 1, 1), Decode("D2", 32, 1), Decode("D3", 8, 4))}
"""One token, a batch of them, and multi-token prediction, at the heads of a Qwen3-Next 80B layer."""


def make_decode(decode: Decode, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return float32 q, k, v, g, beta and state in fla's layout, the state K first and on a cache line."""
    rng = np.random.default_rng(seed)
    tokens = (decode.batch, decode.n_tokens)
    q, k = rng.standard_normal((2, *tokens, decode.hk, decode.dk))
    a, b = rng.standard_normal((2, *tokens, decode.hv))
    state = empty((decode.batch, decode.hv, decode.dk, decode.dv), np.float32)
    state[:] = rng.standard_normal(state.shape)
    tensors = {"q": q, "k": k, "v": rng.standard_normal((*tokens, decode.hv, decode.dv))}
    tensors |= {"g": -np.log1p(np.exp(a - 4.0)), "beta": 1 / (1 + np.exp(-b))}
    inputs: dict[str, NDArray[Any]] = {name: x.astype(np.float32) for name, x in tensors.items()}
    return {**inputs, "state": state}


def make_inputs(workload: Workload, dtype: Any = np.float16, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return q, k, v, g, beta and state as a model makes them, in CANN's layout.

    q and k of length 1, v and state normal, g = -exp(A) softplus(a) with A in 0 .. ln 16 by head, beta = sigmoid(b).
    q [T, Hk, Dk], k [T, Hk, Dk], v [T, Hv, Dv], beta [T, Hv] and state [N, Hv, Dv, Dk] in `dtype`, g [T, Hv] float32.
    """
    rng, dims = np.random.default_rng(seed), workload.dims
    q, k = rng.standard_normal((2, dims.n_tokens, dims.hk, dims.dk))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    a, b = rng.standard_normal((2, dims.n_tokens, dims.hv))
    tensors = {
        "q": q,
        "k": k,
        "v": rng.standard_normal((dims.n_tokens, dims.hv, dims.dv)),
        "beta": 1 / (1 + np.exp(-b)),
        "state": rng.standard_normal((dims.n_sequences, dims.hv, dims.dv, dims.dk)),
    }
    inputs: dict[str, NDArray[Any]] = {name: x.astype(dtype) for name, x in tensors.items()}
    decay = np.exp(rng.uniform(0.0, np.log(16.0), dims.hv))
    inputs["g"] = (-decay * np.log1p(np.exp(a - 4.0))).astype(np.float32)
    return inputs
