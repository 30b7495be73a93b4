"""The operator calls of a model's run as files that `cgdr run` replays."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import cgdr_numba
from cgdr_numba.core.dtypes import round_to
from cgdr_numba.core.tensors import as_arrays
from cgdr_numba.integrations.generation import check_request, step
from cgdr_numba.integrations.transformers import observed
from cgdr_numba.integrations.transformers.guard import Call, Run
from cgdr_numba.integrations.transformers.operators import Inputs, OurOperators, read_inputs
from cgdr_numba.parity.calls import RecordedCall, save_call
from cgdr_numba.parity.operators import CHUNK_OPERATOR, RECURRENT_OPERATOR
from cgdr_numba.parity.replays import replay

Array = NDArray[Any]


OPERATORS: Final = {"gdr": CHUNK_OPERATOR, "kda": RECURRENT_OPERATOR}
"""As whose calls those of a kind of layer are written: log decays of channels are taken over a pool of states only."""


class Recorder:
    """Operators of one kind of layer that note every call in the NPU's form and write it to a file."""

    def __init__(self, kind: str, folder: Path, layers: dict[nn.Module, str], expected: bool) -> None:
        """Take "gdr" or "kda", the folder, the layers' names for files, and whether float64 results are written too."""
        self._kind, self._folder, self._layers, self._expected = kind, folder, layers, expected
        self._operators = OurOperators(kind, None, Counter())
        self._n_calls: Counter[str] = Counter()
        self.paths: list[Path] = []

    def __call__(self, call: Call, run: Run) -> Any:
        """Write a call, and run it."""
        if call.part != "convolution":
            name = self._layers[run.layer]
            path = self._folder / f"{name}_call{self._n_calls[name]}.safetensors"
            self._n_calls[name] += 1
            self._write(path, read_inputs(call, run), {"layer": name, "part": call.part})
        return self._operators(call, run)

    def _write(self, path: Path, inputs: Inputs, metadata: dict[str, str]) -> None:
        """Write one call; the references are golden's, in float64 from the recorded inputs, rounded to their dtypes."""
        metadata["recorded_by"] = f"cgdr_numba {cgdr_numba.__version__}"
        scale = float(inputs.q.shape[-1]) ** -0.5
        arrays = pool_arrays(inputs) if self._kind == "kda" else npu_arrays(inputs)
        call = RecordedCall(str(path), OPERATORS[self._kind], arrays, {}, scale, metadata)
        if self._expected:
            names, given = ("out", call.kind.state), ("value", "state" if self._kind == "kda" else "initial_state")
            results = zip(names, replay(call, "golden"), given, strict=True)
            expected = {name: round_to(x.astype(np.float64), arrays[like].dtype) for name, x, like in results}
            call = replace(call, expected=expected)
        save_call(path, call)
        self.paths.append(path)


def npu_arrays(inputs: Inputs) -> dict[str, Array]:
    """Return a layer's call by the arguments of `npu_chunk_gated_delta_rule`.

    Rows of a batch become sequences one after another ([T, H, D]), states [N, Hv, Dv, Dk]; q and k are normalised
    where the layer leaves that to the operator, in float32 and rounded to their dtype.
    """
    q, k = inputs.q, inputs.k
    if inputs.use_qk_l2norm_in_kernel:
        q, k = _normalised(q), _normalised(k)
    batch, n_tokens, hv, dv = inputs.v.shape
    sums = inputs.cu_seqlens
    lengths = torch.full((batch,), n_tokens) if sums is None else sums.diff()
    state = inputs.initial_state
    if state is None:
        state = torch.zeros(len(lengths), hv, q.shape[-1], dv)
    tensors = {
        "query": q.flatten(0, 1),
        "key": k.flatten(0, 1),
        "value": inputs.v.flatten(0, 1),
        "g": inputs.g.flatten(0, 1),
        "beta": inputs.beta.flatten(0, 1),
        "initial_state": state.transpose(2, 3),
        "actual_seq_lengths": lengths,
    }
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return dict(zip(copies, as_arrays("record", **copies), strict=True))


def pool_arrays(inputs: Inputs) -> dict[str, Array]:
    """Return the call of a layer whose g is [B, T, Hv, Dk] by the arguments of `npu_recurrent_gated_delta_rule`.

    The pool has one slot a sequence: its initial state, which every token of the sequence moves on.
    """
    arrays = npu_arrays(inputs)
    arrays["gk"], arrays["state"] = arrays.pop("g"), arrays.pop("initial_state")
    lengths = arrays["actual_seq_lengths"]
    arrays["ssm_state_indices"] = np.repeat(np.arange(len(lengths)), lengths)
    return arrays


def _normalised(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x^2 + 1e-6) over the last axis, in x's dtype."""
    wide = x.float()
    return (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


def record(
    model: nn.Module, prompt: list[int], folder: Path, *, max_new_tokens: int = 1, expected: bool = True
) -> list[Path]:
    """Run a prompt and greedy tokens after it, and write every operator call to `folder`.

    Calls of layers with one log decay a head are `npu_chunk_gated_delta_rule`'s, those of layers with one a channel
    (KDA) `npu_recurrent_gated_delta_rule`'s, over a pool with one slot a sequence.

    Args:
        model: A causal language model in eval mode.
        prompt: Token ids, at least one.
        folder: Where files go, named by layer and call: layer0_call0.safetensors is its prefill. It may exist.
        max_new_tokens: Tokens to generate, at least 1; those behind the first take a decode call of every layer.
        expected: Whether golden's results are written too (about 40 us a token and head of 128 by 128).

    Returns:
        The files.

    Raises:
        ContractError: The prompt is empty, or no token is asked for.
        UnsupportedError: The model has no layer that is covered.
    """
    check_request("record", prompt, max_new_tokens)
    names = {module: f"layer{module.layer_idx}" for module in model.modules() if hasattr(module, "layer_idx")}
    recorders: list[Recorder] = []

    def recording(kind: str) -> Recorder:
        """Return a recorder for one kind of layer."""
        recorders.append(Recorder(kind, folder, names, expected))
        return recorders[-1]

    with observed(model, recording), torch.inference_mode():
        folder.mkdir(parents=True, exist_ok=True)
        ids, cache = torch.tensor([prompt]), None
        for _ in range(max_new_tokens):
            logits, cache = step(model, ids, cache)
            ids = logits[:, -1].argmax(-1, keepdim=True)
    return [path for recorder in recorders for path in recorder.paths]
