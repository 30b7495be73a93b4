"""Arguments that nobody should pass: always the contract's own errors, and a pool that was not touched."""

from typing import Any

import numpy as np
import pytest

from cgdr_numba import ContractError, UnsupportedError, npu_recurrent_gated_delta_rule
from pool_cases import BACKENDS, make_pool_case

CASE = make_pool_case(1, (2, 1), dims=(8, 16), gates="g vector", accepted=True, dtype=np.float16, state=np.float32)
HOSTILE: dict[str, Any] = {
    "None": None,
    "text": "x",
    "bytes": b"x",
    "number": 3,
    "nan": float("nan"),
    "flag": True,
    "empty list": [],
    "nested list": [[1, 2], [3]],
    "set": {1, 2},
    "object": object(),
    "objects": np.array([object(), None]),
    "scalar array": np.array(2),
    "text array": np.array(["a", "b"]),
    "flags": np.array([True, False, True]),
    "complex": np.ones((3, 2), np.complex128),
    "floats": np.array([1.5, 2.0]),
    "many axes": np.ones((1,) * 7, np.float16),
    "swapped bytes": np.ones((3, 1, 8), np.dtype(np.float16).newbyteorder()),
    "masked": np.ma.masked_array(np.ones((3, 1, 8), np.float16)),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "records": np.zeros(3, [("a", "f4")]),
    "huge": np.array([2**64 - 1, 0], np.uint64),
    "huge list": [10**30, 0],
    "negative": np.array([-5, -5]),
}
ARGUMENTS = (*CASE.arguments(), "state", "seq_lens_format", "backend", "target", "plan", "threads", "overflow")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument(name: str, backend: str) -> None:
    for what, value in HOSTILE.items():
        pool = CASE.state.copy()
        given = {**CASE.arguments(), "read_indices": None, "state": pool, "backend": backend, name: value}
        message = ""
        try:
            npu_recurrent_gated_delta_rule(**given)
        except (ContractError, UnsupportedError) as error:
            message = str(error)
        if message:
            assert message.startswith("npu_recurrent_gated_delta_rule: "), what
            assert "got" in message, what
            np.testing.assert_array_equal(pool, CASE.state)
        else:
            # What is left out has a meaning, and so has any number as the scale.
            assert value is None or (name, what) in {("scale", "number"), ("scale", "nan")}, what
