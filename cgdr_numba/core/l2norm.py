"""The l2 norm that models apply to q and k before the operator."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

L2NORM_EPS: Final = 1e-6
"""Added to the sum of squares, inside the root, so that a zero vector stays zero."""


def l2norm(x: NDArray[Any], dtype: type[np.float32] | type[np.float64]) -> NDArray[Any]:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last axis, computed in `dtype` (so 300 in float16 does not overflow).

    The sum runs over a C-contiguous copy: its order depends on the last axis' length alone, never on strides.
    """
    wide: NDArray[Any] = np.ascontiguousarray(x, dtype=dtype)
    length: NDArray[Any] = np.sqrt(np.add.reduce(np.square(wide), axis=-1) + dtype(L2NORM_EPS))
    normalised: NDArray[Any] = np.divide(wide, length[..., np.newaxis])
    return normalised
