"""A decode step prepared once: contract and plan at the start, cheap comparisons and one launch a call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cgdr_numba.backends import check_out_state, check_threads
from cgdr_numba.core import memory
from cgdr_numba.core.checks import Checks
from cgdr_numba.core.contract import Tensors, fla_problem
from cgdr_numba.core.fast.launch import PreparedSteps
from cgdr_numba.core.tensors import as_arrays, as_tensor, is_tensor, records_gradients
from cgdr_numba.core.threads import current_threads
from cgdr_numba.ops.tensor_step import tensor_step
from cgdr_numba.sched.steps import plan_steps

Array = NDArray[Any]


class RecurrentStep:
    """`fused_recurrent_gated_delta_rule` for a decode loop: the same call again and again, the state in place.

    Everything that stays is given once, with arrays that stand for those to come: their shapes and dtypes are what
    later calls must have. Results are the function's, bit for bit. Raw gates are computed before each call, by
    `fused_gdn_gating`. A step that is prepared with torch tensors takes torch tensors.

    Args:
        q: Queries [B, T, Hk, Dk]; float16, bfloat16 or float32.
        k: Keys, shape and dtype of q.
        v: Values [B, T, Hv, Dv], dtype of q.
        g: Natural log of the decay [B, T, Hv], any float dtype.
        beta: How much of the error is written [B, T, Hv], any float dtype.
        state: Float32 [B, Hv, Dk, Dv] ([B, Hv, Dv, Dk] with state_v_first) with adjacent elements in a row.
        scale: Factor on q; None means Dk^-0.5.
        use_qk_l2norm_in_kernel: Normalise q and k first.
        state_v_first: Layout of the state.
        threads: Threads to run on; None takes the default of now, as `fused_recurrent_gated_delta_rule` has it.

    Raises:
        ContractError: As `fused_recurrent_gated_delta_rule` with `out_state=state`; also from calls.

    A step keeps its scratch, so it is for one thread at a time.

    Example:
        >>> import numpy as np
        >>> from cgdr_numba import RecurrentStep
        >>> one, state = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 8, np.float32)
        >>> g, beta = np.full((1, 1, 1), np.log(0.5), np.float32), np.full((1, 1, 1), 0.5, np.float32)
        >>> step = RecurrentStep(one, one, one, g, beta, state, scale=1.0)
        >>> [step(one, one, v * one, g, beta, state).item() for v in (2, 4, 6)]
        [3.0, 2.75, 3.6875]
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        beta: Array,
        state: Array,
        *,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        threads: int | None = None,
    ) -> None:
        tensors = (q, k, v, g, beta, state)
        self._takes_tensors = is_tensor(q)
        if self._takes_tensors:
            q, k, v, g, beta, state = as_arrays("RecurrentStep", q=q, k=k, v=v, g=g, beta=beta, state=state)
        checks = Checks("RecurrentStep")
        for name, value in (("g", g), ("beta", beta), ("state", state)):
            checks.array(name, value)
        self._options: dict[str, Any] = {
            "scale": scale,
            "normalise": use_qk_l2norm_in_kernel,
            "state_v_first": state_v_first,
        }
        arrays = (q, k, v, g, beta, state)
        problem = self._check(arrays)
        self._expected = tuple((x.shape, x.dtype) for x in arrays)
        n_threads = check_threads(checks, threads)
        plan = plan_steps(problem.dims, problem.lengths, n_threads or current_threads())
        self._steps = PreparedSteps(problem, plan, n_threads)
        self.run_alike = tensor_step(self._steps, tensors, arrays) if self._takes_tensors else None
        """What a step on torch tensors tries first, see `tensor_step`; None on arrays, and without JIT."""

    def _check(self, arrays: tuple[Array, ...]) -> Any:
        """Return the problem of a call after all checks of the contract."""
        q, k, v, g, beta, state = arrays
        tensors = Tensors(q, k, v, g, beta, state)
        problem = fla_problem("RecurrentStep", tensors, cu_seqlens=None, **self._options)
        check_out_state(Checks("RecurrentStep"), problem, state, state, "state")
        return problem

    def __call__(self, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Array:
        """Run the tokens and move `state` on in place; returns out [B, T, Hv, Dv] in q's dtype.

        Raises:
            ContractError: A shape, dtype or layout other than at the start.
            UnsupportedError: A torch tensor that requires grad, or is not on the CPU.
        """
        if self.run_alike is not None and not records_gradients(q, k, v, g, beta, state):
            result: Array | None = self.run_alike(q, k, v, g, beta, state)
            if result is not None:
                return result
        if self._takes_tensors:
            q, k, v, g, beta, state = as_arrays("RecurrentStep", q=q, k=k, v=v, g=g, beta=beta, state=state)
        arrays = (q, k, v, g, beta, state)
        for array, (shape, dtype) in zip(arrays, self._expected, strict=False):
            if type(array) is not np.ndarray or array.shape != shape or array.dtype is not dtype:
                self._refuse(arrays)
        if state.strides[3] != 4 or not state.flags.writeable:
            self._check(arrays)
        out = memory.result(v.shape, q.dtype)
        self._steps.run(arrays, out)
        return as_tensor(out) if self._takes_tensors else out

    def _refuse(self, arrays: tuple[Array, ...]) -> None:
        """Raise for arrays that are not like those that the step was prepared for."""
        checks = Checks("RecurrentStep")
        names = ("q", "k", "v", "g", "beta", "state")
        for name, value, (shape, dtype) in zip(names, arrays, self._expected, strict=True):
            array = checks.array(name, value)
            if array.shape != shape or array.dtype != dtype:
                raise checks.error(
                    f"`{name}` must be as prepared, {list(shape)} {dtype}, got {list(array.shape)} {array.dtype}"
                )
