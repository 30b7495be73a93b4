"""From a checked problem over a pool and the caller's options to results: which backend runs, by which plan."""

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from cgdr_numba.backends import check_threads
from cgdr_numba.core import golden_pool, memory
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.pool_contract import PoolProblem
from cgdr_numba.errors import UnsupportedError

Array = NDArray[Any]

POOL_BACKENDS: Final = ("faithful", "golden")
"""The backends of the recurrent function over a pool."""


class PoolOptions(NamedTuple):
    """How a checked problem is to be run, as the caller said it."""

    backend: object
    target: object
    plan: object
    threads: object
    overflow: object


def run_pool(problem: PoolProblem, options: PoolOptions) -> Array:
    """Check the options and run the backend: the pool is updated in place. Returns out [T, Hv, Dv]."""
    checks = Checks(problem.op)
    backend = checks.choice("backend", options.backend, POOL_BACKENDS)
    check_threads(checks, options.threads)
    if backend == "faithful":
        raise UnsupportedError(f'{problem.op}: backend="faithful" is not offered yet; take "golden"')
    _refuse(checks, options, backend)
    out = _result(problem)
    golden_pool.run(problem, out)
    return out


def _result(problem: PoolProblem) -> Array:
    """Return an array for out, unwritten but for padding rows."""
    out = memory.result(problem.v.shape, problem.q.dtype)
    if len(problem.padding):
        out[problem.padding] = 0
    return out


def _refuse(checks: Checks, options: PoolOptions, backend: str) -> None:
    """Raise for options that a backend without a device does not have."""
    defaults = {"target": None, "plan": None, "overflow": "ieee"}
    for name, default in defaults.items():
        value = getattr(options, name)
        if value is not default and not (isinstance(value, str) and value == default):
            raise checks.error(
                f'`{name}` must be left out with backend="{backend}", which has no device, got {value!r}'
            )
