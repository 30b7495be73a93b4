"""Memory of large results, used again once the last array over it is gone.

The C library maps requests of 32 MiB and more afresh each time, and the kernel zeroes every page of them: 3 of the 40
ms of a prefill whose result is that large. Smaller requests it serves again by itself.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEASED_BYTES: Final = 2**25
"""Results from this size on are leased: glibc's largest threshold for fresh maps."""
MOST_SPARE_BYTES: Final = 2**26
"""The largest block that is kept while no array uses it; there is never more than one."""

_spare: list[NDArray[np.uint8]] = []
"""The block that was given back last, if it is not in use again. Popping and replacing are atomic."""


class Lease:
    """A block of memory, which `numpy.asarray` shows as bytes; it is given back when nothing refers to the lease."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, n_bytes: int) -> None:
        self._block: NDArray[np.uint8] | None = None
        self._block = _take(n_bytes)
        address = self._block.__array_interface__["data"][0]
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
        }

    def __del__(self, spare: list[NDArray[np.uint8]] = _spare, most: int = MOST_SPARE_BYTES) -> None:
        """Keep the block as the spare one. The defaults outlive the module's names at the interpreter's end."""
        if self._block is not None and self._block.nbytes <= most:
            spare[:] = [self._block]


def _take(n_bytes: int) -> NDArray[np.uint8]:
    """Return the spare block where it fits and half of it at least is asked for, or else a new one."""
    try:
        block = _spare.pop()
    except IndexError:
        return np.empty(n_bytes, np.uint8)
    return block if n_bytes <= block.nbytes <= 2 * n_bytes else np.empty(n_bytes, np.uint8)
