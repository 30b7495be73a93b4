"""Keywords that the public functions do not take."""

from typing import Final, Never

from cgdr_numba.errors import UnsupportedError

_FLA_ONLY: Final = {
    "head_first": "tensors are [B, T, H, D] here, as in fla",
    "chunk_size": "the chunk is 64 tokens, as in the kernel",
    "transpose_state_layout": "this is fla's deprecated name of state_v_first",
    "cu_seqlens_cpu": "cu_seqlens is all that a CPU needs",
    "chunk_indices": "the plan makes its own work items",
    "cp_context": "context parallelism is not offered",
}
"""What fla's further keywords mean, and why they are not taken."""


def refuse_unknown(op: str, unknown: dict[str, Never]) -> None:
    """Raise TypeError for keywords outside of the signature; say so where fla knows them."""
    for name in unknown:
        reason = f" (known to fla: {_FLA_ONLY[name]})" if name in _FLA_ONLY else ""
        raise TypeError(f"{op}() got an unexpected keyword argument '{name}'{reason}")


_NOT_OFFERED: Final = {
    "disable_recompute": "it concerns fla's backward pass, and there is none",
    "return_intermediate_states": "no state between chunks is kept",
}
"""What options of fla mean that are taken as they are by default and no other way."""


def refuse_not_offered(op: str, **given: object) -> None:
    """Raise UnsupportedError for the first option that is not False."""
    for name, value in given.items():
        if value is not False:
            raise UnsupportedError(f"{op}: `{name}` is not offered: {_NOT_OFFERED[name]}")
