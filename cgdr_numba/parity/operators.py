"""The operators whose calls are recorded: what their files hold, and how it is to be read."""

from typing import Final, NamedTuple

from cgdr_numba.core.pool_contract import LENGTH_FORMATS
from cgdr_numba.ops import BACKENDS, POOL_BACKENDS

CHUNK_OPERATOR: Final = "npu_chunk_gated_delta_rule"
RECURRENT_OPERATOR: Final = "npu_recurrent_gated_delta_rule"


class Operator(NamedTuple):
    """What is known of one operator."""

    name: str
    backends: tuple[str, ...]
    required: tuple[str, ...]
    """Arguments that a file must hold."""
    optional: tuple[str, ...]
    """Arguments that it may hold."""
    state: str
    """Name of the result beside `out`."""
    state_axes: str
    length_forms: tuple[str, ...]
    """How actual_seq_lengths may be written; the first is the default."""

    @property
    def expected(self) -> dict[str, str]:
        """References that a file may hold, and their axes."""
        return {"expected_out": "T, Hv, Dv", f"expected_{self.state}": self.state_axes}

    @property
    def formats(self) -> dict[str, tuple[str, ...]]:
        """Metadata that says how arrays are to be read, and the values that each may have; absent means the first."""
        state_layout = self.state_axes.replace(" ", "")
        return {"layout": ("TND",), "state_layout": (state_layout,), "seq_lens_format": self.length_forms}


_TENSORS: Final = ("query", "key", "value", "beta")

OPERATORS: Final = {
    CHUNK_OPERATOR: Operator(
        name=CHUNK_OPERATOR,
        backends=BACKENDS,
        required=(*_TENSORS, "initial_state", "actual_seq_lengths"),
        optional=("g",),
        state="final_state",
        state_axes="N, Hv, Dv, Dk",
        length_forms=("lengths",),
    ),
    RECURRENT_OPERATOR: Operator(
        name=RECURRENT_OPERATOR,
        backends=POOL_BACKENDS,
        required=(*_TENSORS, "state", "actual_seq_lengths", "ssm_state_indices"),
        optional=("g", "gk", "num_accepted_tokens", "read_indices"),
        state="state",
        state_axes="slots, Hv, Dv, Dk",
        length_forms=LENGTH_FORMATS,
    ),
}
"""Every operator by its name."""
