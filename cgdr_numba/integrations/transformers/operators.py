"""What an enabled layer runs: the operators of this package on the layer's tensors."""

import threading
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cgdr_numba
from cgdr_numba.core.threads import current_threads
from cgdr_numba.errors import UnsupportedError
from cgdr_numba.integrations.transformers.guard import Call, Run
from cgdr_numba.ops.tensor_step import TensorStep

_MEANINGFUL = frozenset(
    (
        "scale",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
        "transpose_state_layout",
        "head_first",
        "A_log",
        "dt_bias",
        "lower_bound",
        "safe_gate",
    )
)
"""Keywords of fla's that would change results; no version of transformers gives them."""


class Inputs(NamedTuple):
    """What a layer gives its operator; keywords of other functions, which it passes on too, are left out."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that gradients could flow to."""
        state = () if self.initial_state is None else (self.initial_state,)
        return (self.q, self.k, self.v, self.g, self.beta, *state)


class _Last(NamedTuple):
    """The decode step that ran last."""

    run: TensorStep
    """See `tensor_step`."""
    normalises: bool


class _Steps(threading.local):
    """A thread's prepared decode steps, by what they were prepared for."""

    def __init__(self) -> None:
        self.by_key: dict[Any, cgdr_numba.RecurrentStep] = {}
        self.last: _Last | None = None
        """The step that ran last; mostly it runs again."""


class OurOperators:
    """The operators of this package.

    Padding decays nothing and writes nothing: its g and beta are zero. Packed sequences are kept apart, in the
    causal convolution as well. A call that records gradients goes to the function that was replaced.
    """

    def __init__(self, operator: str, threads: int | None, counts: Counter[str]) -> None:
        """Take "gdr" or "kda", the threads to run on (None: one for small steps, else the default), counts of calls."""
        names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
        if operator == "kda":
            names = ("chunk_kda", "fused_recurrent_kda")
        self._functions = {part: getattr(cgdr_numba, name) for part, name in zip(PARTS, names, strict=True)}
        self._options: dict[str, Any] = {"threads": threads}
        self._prepares, self._steps = operator == "gdr", _Steps()
        self._counts = counts

    def __call__(self, call: Call, run: Run) -> Any:
        """Run one call of a layer."""
        last = self._steps.last
        if last is not None and call.part == "recurrent":
            out = _repeat(last, call, run)
            if out is not None:
                self._counts["cgdr_numba"] += 1
                return out, call.keywords["initial_state"]
        elif call.part == "convolution":
            return _convolution(call, run)
        inputs = read_inputs(call, run)
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs.tensors()):
            self._counts["original"] += 1
            if not run.layer.training:
                warnings.warn(_GRADIENTS, stacklevel=2)
            return call.run_original()
        self._counts["cgdr_numba"] += 1
        state = inputs.initial_state
        # A prompt is where another number of threads is noticed.
        self._steps.last = None
        if call.part == "recurrent" and state is not None and inputs.output_final_state and _is_writable(state):
            # The layer copies the result into this tensor next, which then is nothing to do.
            if self._prepares and inputs.cu_seqlens is None:
                tensors = (*inputs[:5], state)
                return self._step(tensors, inputs.use_qk_l2norm_in_kernel)(*tensors), state
            return self._functions[call.part](**inputs._asdict(), **self._options, out_state=state)
        return self._functions[call.part](**inputs._asdict(), **self._options)

    def _step(self, tensors: tuple[Tensor, ...], normalise: bool) -> cgdr_numba.RecurrentStep:
        """Return a step prepared for such tensors, this thread's own: a step takes a third of a call's checks."""
        threads = self._options["threads"]
        if threads is None:
            threads = 1 if tensors[-1].nbytes <= _SMALL_BYTES else current_threads()
        key = (*[(x.shape, x.dtype, x.stride()) for x in tensors], normalise, threads)
        steps = self._steps.by_key
        if key not in steps:
            steps[key] = cgdr_numba.RecurrentStep(*tensors, use_qk_l2norm_in_kernel=normalise, threads=threads)
        step = steps[key]
        if step.run_alike is not None:
            self._steps.last = _Last(step.run_alike, normalise)
        return step


_SMALL_BYTES = 2**21
"""States up to which a decode step runs on the calling thread: torch's other threads, which wait for their next work
in a loop, would have to make room for ours first. With four times as many two threads are faster."""

PARTS = ("chunk", "recurrent")

_GRADIENTS = (
    "cgdr_numba: gradients are recorded, so layers that are enabled run transformers' own functions; "
    "for inference call the model under torch.inference_mode() or torch.no_grad()"
)


def read_inputs(call: Call, run: Run) -> Inputs:
    """Return what the operator takes from a layer's call, with padding that neither decays nor writes."""
    return _read(run, *call.arguments, **call.keywords)


def _read(
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **stray: Any,
) -> Inputs:
    """Take the operator's arguments by name out of all that a layer passes on."""
    if stray:
        _refuse_meaningful(stray)
    if run.padding is not None:
        g, beta = (x.masked_fill(run.padding[:, :, None, *[None] * (x.ndim - 3)], 0) for x in (g, beta))
    sums = cu_seqlens if cu_seqlens is not None else run.cu_seqlens
    return Inputs(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, sums)


def _repeat(last: _Last, call: Call, run: Run) -> Tensor | None:
    """Run a decode step as the last one was; None where it is another one, which nothing has been done for.

    Between two layers of a model the weights go through the caches, so whatever is looked at costs: this is all.
    """
    keywords = call.keywords
    if (
        run.padding is not None
        or run.cu_seqlens is not None
        or torch.is_grad_enabled()
        or not _MEANINGFUL.isdisjoint(keywords)
    ):
        return None
    try:
        query, key, value = call.arguments
        g, beta, state = keywords["g"], keywords["beta"], keywords["initial_state"]
        normalises, is_final_wanted = keywords["use_qk_l2norm_in_kernel"], keywords["output_final_state"]
    except (KeyError, ValueError):
        # They are given in another way than by any covered version of transformers.
        return None
    if (
        normalises is not last.normalises
        or not is_final_wanted
        or state is None
        or keywords.get("cu_seqlens") is not None
    ):
        return None
    return last.run(query, key, value, g, beta, state)


def _refuse_meaningful(stray: dict[str, Any]) -> None:
    """Refuse arguments that would change results."""
    changed = [
        name for name, value in stray.items() if name in _MEANINGFUL and value is not None and value is not False
    ]
    if changed:
        raise UnsupportedError(f"enable: a layer gives `{changed[0]}`, which no covered version of transformers does")


def _is_writable(state: Tensor | None) -> bool:
    """Return whether a cached state can be moved on where it lies."""
    return state is not None and state.dtype == torch.float32 and state.is_contiguous()


def _convolution(call: Call, run: Run) -> Tensor:
    """Run the layer's causal convolution over each packed sequence by itself.

    The input is [1, C, P + T]; P columns before the first token are what a cache holds of the tokens before it.
    """
    name = "hidden_states" if "hidden_states" in call.keywords else "x"
    if run.cu_seqlens is None:
        return call.run_original()
    keywords = {key: value for key, value in call.keywords.items() if key not in ("cu_seqlens", "seq_idx", name)}
    arguments, hidden = call.arguments, call.keywords.get(name)
    if hidden is None:
        hidden, arguments = call.arguments[0], call.arguments[1:]
    sums = run.cu_seqlens.tolist()
    n_before = hidden.shape[-1] - sums[-1]
    starts = [0, *(n_before + start for start in sums[1:-1])]
    ends = [n_before + end for end in sums[1:]]
    pieces = [
        call.original(hidden[..., start:end], *arguments, **keywords)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
    return torch.cat(pieces, dim=-1)
