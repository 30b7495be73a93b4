"""The kernel's greedy rule, as a pure function of the items' loads."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cgdr_numba.core.dims import ceil_div


def fill_bins(loads: ArrayLike, n_cores: int) -> NDArray[np.int64]:
    """Return CSR pointers [n_bins + 1]: bin b holds items ptr[b] to ptr[b + 1], in the order given.

    Bins are filled one after another until they reach the average load ceil(sum / n_cores); the item that crosses it
    still belongs to the bin it fills. So no item is lost, the order is kept, and there are at most `n_cores` bins.
    On the NPU every core makes this walk by itself and keeps the items of its own number.
    """
    sizes = np.asarray(loads, dtype=np.int64)
    if sizes.size == 0:
        return np.zeros(1, np.int64)
    average = ceil_div(int(sizes.sum()), n_cores)
    ptr, load = [0], 0
    for item, size in enumerate(sizes.tolist()):
        load += size
        if load >= average:
            ptr.append(item + 1)
            load = 0
    if ptr[-1] != sizes.size:
        ptr.append(sizes.size)
    return np.array(ptr, np.int64)
