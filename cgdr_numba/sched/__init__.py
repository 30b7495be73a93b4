"""From the sizes of a call to a plan: device, tiling, ledger, work items, bins."""

from cgdr_numba.sched.device import ASCEND_310P, DeviceSpec, host
from cgdr_numba.sched.host_plan import HostPlan
from cgdr_numba.sched.plan import Plan, plan_chunk
from cgdr_numba.sched.pool_plan import PoolPlan, plan_step

__all__ = ["ASCEND_310P", "DeviceSpec", "HostPlan", "Plan", "PoolPlan", "host", "plan_chunk", "plan_step"]
