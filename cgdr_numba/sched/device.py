"""Devices that a plan is made for. Every hardware number of the package stands here, with its source."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from cgdr_numba.errors import ContractError

BLOCK_BYTES = 32
"""Bytes that a DMA transfer moves at the least (AscendC's data block)."""
FP16_PER_BLOCK = 16
"""fp16 elements in a data block."""
FP32_PER_BLOCK = 8
"""fp32 elements in a data block."""
MAX_DMA_GAP_BLOCKS = 65535
"""Data blocks that a strided transfer may skip between rows (a 16-bit field)."""
MAX_RECURRENT_CORES = 8
"""Cores that the recurrent kernel's host code starts at the most, whatever the device has."""
RECURRENT_WORKSPACE_BYTES = 16 * 1024 * 1024
"""Workspace that the recurrent kernel's host code asks for and the kernel leaves alone."""
MAX_QUEUE_BUFFERS = 8
"""Buffers that the recurrent kernel's queues may have together."""
MIN_WORKSPACE_BYTES = 32 * 1024 * 1024
"""Workspace that the NPU's host code asks for at the least. Reported only; the real need is allocated."""

_DEFAULT_L2_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The cores and the unified buffer (UB) that a plan may fill.

    Other sizes than a ready spec's: ``dataclasses.replace(ASCEND_310P, cores=4, ub_bytes=196608)``.
    """

    name: str
    """Short name, as ``target=`` takes it."""
    cores: int
    """Cores that work items are spread over (AIV cores of an NPU; threads of a host)."""
    ub_bytes: int
    """Bytes of fast memory of one core: the UB of an NPU, the L2 cache of a host."""
    source: str = "given by the caller"
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        """Refuse sizes that no plan could be made for."""
        sizes: tuple[tuple[str, object], ...] = (("cores", self.cores), ("ub_bytes", self.ub_bytes))
        for field, value in sizes:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(f"DeviceSpec: `{field}` must be an integer of at least 1, got {value!r}")


ASCEND_310P = DeviceSpec(
    name="310p",
    cores=8,
    ub_bytes=262144,
    source="Ascend 310P3: 256 KiB UB a core; GetCoreNumAiv() = 8 as measured in the tiling commentary",
)
"""The Atlas 300I Duo's chip, as the kernel's host code sees it."""


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host() -> DeviceSpec:
    """Return this machine: the cores of this process's affinity mask, the L2 cache as the fast memory."""
    return DeviceSpec(
        name="host",
        cores=usable_cores(),
        ub_bytes=host_cache_bytes(),
        source="affinity mask of this process; L2 of core 0 as Linux reports it (1 MiB where it does not)",
    )


@functools.cache
def host_cache_bytes() -> int:
    """Return the bytes of core 0's L2 cache, or 1 MiB where the system does not tell."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    try:
        text = path.read_text().strip()
        unit = {"K": 1024, "M": 1024 * 1024}.get(text[-1:])
        size = int(text[:-1]) * unit if unit else int(text)
    except (OSError, ValueError):
        return _DEFAULT_L2_BYTES
    return size if size > 0 else _DEFAULT_L2_BYTES


def resolve(target: object, default: str, op: str) -> DeviceSpec:
    """Return the device that ``target=`` names (a name or a DeviceSpec); `default` where it is None.

    `op` begins the message of a refusal.
    """
    if isinstance(target, DeviceSpec):
        return target
    name = default if target is None else target
    hint = ""
    if isinstance(name, str):
        if name == ASCEND_310P.name:
            return ASCEND_310P
        if name == "host":
            return host()
        hint = " (the 910B's kernel is another one)" if name.lower().startswith("910") else ""
    raise ContractError(f'{op}: `target` must be "310p", "host" or a DeviceSpec, got {name!r}{hint}')
