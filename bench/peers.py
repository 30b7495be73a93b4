"""Other libraries beside ours: adapters whose calls are ready to be timed, with every conversion done before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from batches import Array, Batch, aligned
from cgdr_numba.core import memory

Call = Callable[[], list[tuple[Any, Any]]]
"""Runs every batch once (decode moves its state on); returns (out [B, T, Hv, Dv], state [B, Hv, Dk, Dv]) of each.

What is returned may be overwritten by the next call.
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's operator by a name, and how its calls are prepared."""

    name: str
    prepare: Callable[[Sequence[Batch], int], Call]
    """From batches and a number of threads; skips the benchmark where the library is missing."""

    def __str__(self) -> str:
        return self.name


def linear_attention(batches: Sequence[Batch], n_threads: int, in_place: bool) -> Call:
    """Prepare onnxruntime's com.microsoft.LinearAttention: a token loop, value heads sharing key heads.

    It does not normalise q and k. Two buffers hold a state by turns, or in_place one that is both input and output:
    the operator's schema does not promise that, so the gate has to find it right.
    """
    # NOTE: com.microsoft.GatedDeltaNet of onnxruntime 1.32, which packs sequences, takes 5 to 12 times as long.
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = n_threads, 1
    session = onnxruntime.InferenceSession(_one_node(batches[0]), options, providers=["CPUExecutionProvider"])
    calls = [_BoundCall(session, onnxruntime.OrtValue.ortvalue_from_numpy, batch, in_place) for batch in batches]
    return lambda: [call() for call in calls]


def _one_node(batch: Batch) -> bytes:
    """Return the model of one LinearAttention with the batch's heads."""
    onnx = pytest.importorskip("onnx")
    inputs, outputs = ["q", "k", "v", "state", "g", "beta"], ["out", "final_state"]
    heads = {"q_num_heads": batch["q"].shape[2], "kv_num_heads": batch["v"].shape[2]}
    scale = batch["q"].shape[3] ** -0.5
    node = onnx.helper.make_node(
        "LinearAttention", inputs, outputs, domain="com.microsoft", update_rule="gated_delta", scale=scale, **heads
    )
    values = {n: onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in inputs + outputs}
    graph = onnx.helper.make_graph([node], "step", [values[n] for n in inputs], [values[n] for n in outputs])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model: bytes = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


class _BoundCall:
    """One batch with all its buffers bound, so that nothing is copied or allocated in a call."""

    def __init__(self, session: Any, share: Callable[[Array], Any], batch: Batch, in_place: bool) -> None:
        first = aligned(batch["state"])
        states = [first, first if in_place else aligned(first)]
        out = memory.empty(batch["v"].shape, np.float32)
        packed = {n: x.reshape(*x.shape[:2], -1) for n, x in batch.items() if n != "state"}  # [B, T, H D]
        self._inputs = {n: share(x) for n, x in packed.items()}
        self._out = share(out.reshape(packed["v"].shape))
        self._states = [share(x) for x in states]
        self._run = session.run_with_iobinding
        self._turns = [(self._bind(session.io_binding(), turn), (out, states[1 - turn])) for turn in (0, 1)]

    def _bind(self, binding: Any, turn: int) -> Any:
        """Bind the inputs and outputs of a turn."""
        for name, value in {**self._inputs, "state": self._states[turn]}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in {"out": self._out, "final_state": self._states[1 - turn]}.items():
            binding.bind_ortvalue_output(name, value)
        return binding

    def __call__(self) -> tuple[Array, Array]:
        binding, results = self._turns[0]
        self._turns.reverse()
        self._run(binding)
        return results


def transformers(batches: Sequence[Batch], n_threads: int, operator: str) -> Call:
    """Prepare a torch function of transformers' Qwen3-Next, key heads repeated; sets torch's number of threads."""
    torch = pytest.importorskip("torch")
    function = getattr(pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next"), operator)
    torch.set_num_threads(n_threads)
    tensors = []
    for batch in batches:
        n_shared = batch["v"].shape[2] // batch["q"].shape[2]
        repeated = {n: np.repeat(batch[n], n_shared, axis=2) for n in ("q", "k")}
        tensors.append([torch.from_numpy(aligned((batch | repeated)[n])) for n in ("q", "k", "v", "g", "beta")])
    states = [torch.from_numpy(aligned(batch["state"])) for batch in batches]

    def call() -> list[tuple[Any, Any]]:
        outs = []
        with torch.no_grad():
            for i, (q, k, v, g, beta) in enumerate(tensors):
                out, states[i] = function(q, k, v, g, beta, initial_state=states[i], output_final_state=True)
                outs.append(out)
        return list(zip(outs, states, strict=True))

    return call


DECODE_PEERS = (
    Peer("onnxruntime-in-place", partial(linear_attention, in_place=True)),
    Peer("onnxruntime", partial(linear_attention, in_place=False)),
    Peer("transformers", partial(transformers, operator="torch_recurrent_gated_delta_rule")),
)
PREFILL_PEERS = (
    Peer("onnxruntime", partial(linear_attention, in_place=False)),
    Peer("transformers", partial(transformers, operator="torch_chunk_gated_delta_rule")),
)
