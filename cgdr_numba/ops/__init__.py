"""The public functions: fla's names and layouts, and CANN's, over one contract."""

from cgdr_numba.backends import BACKENDS, RECURRENT_BACKENDS
from cgdr_numba.ops.chunk import Backend, chunk_gated_delta_rule, npu_chunk_gated_delta_rule
from cgdr_numba.ops.gating import fused_gdn_gating
from cgdr_numba.ops.kda import chunk_kda, fused_recurrent_kda
from cgdr_numba.ops.pool import npu_recurrent_gated_delta_rule
from cgdr_numba.ops.recurrent import fused_recurrent_gated_delta_rule
from cgdr_numba.ops.step import RecurrentStep
from cgdr_numba.pool_backends import POOL_BACKENDS

__all__ = [
    "BACKENDS",
    "POOL_BACKENDS",
    "RECURRENT_BACKENDS",
    "Backend",
    "RecurrentStep",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "npu_chunk_gated_delta_rule",
    "npu_recurrent_gated_delta_rule",
]
