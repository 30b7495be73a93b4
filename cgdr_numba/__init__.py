"""The Gated Delta Rule on CPUs: fast in float32, a float64 definition, a re-enactment of the Ascend 310P kernels."""

from cgdr_numba.core.dims import Dims
from cgdr_numba.errors import BudgetError, ContractError, DtypeError, UnsupportedError
from cgdr_numba.ops import (
    RecurrentStep,
    chunk_gated_delta_rule,
    chunk_kda,
    fused_gdn_gating,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    npu_chunk_gated_delta_rule,
    npu_recurrent_gated_delta_rule,
)
from cgdr_numba.sched import ASCEND_310P, DeviceSpec, HostPlan, Plan, PoolPlan, host, plan_chunk, plan_step

__version__ = "0.1.0"

__all__ = [
    "ASCEND_310P",
    "BudgetError",
    "ContractError",
    "DeviceSpec",
    "Dims",
    "DtypeError",
    "HostPlan",
    "Plan",
    "PoolPlan",
    "RecurrentStep",
    "UnsupportedError",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "host",
    "npu_chunk_gated_delta_rule",
    "npu_recurrent_gated_delta_rule",
    "plan_chunk",
    "plan_step",
]
