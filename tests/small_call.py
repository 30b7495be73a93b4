"""Small recorded calls that tests write into files, whole or broken."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cgdr_numba.parity.calls import RecordedCall
from pool_cases import make_pool_case, pool_loop
from reference import make_case, token_loop

DATA = Path(__file__).parent / "data"
"""Folder of the committed recorded calls."""
LENGTHS = (5, 0, 3)


def small_call(dtype: Any = np.float16, lengths: tuple[int, ...] = LENGTHS) -> RecordedCall:
    """A call of Hk = 1, Hv = 2, Dk = 16, Dv = 32 with references by the independent float64 loop."""
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    case = make_case(92, t=int(cu[-1]), heads=(1, 2), dims=(16, 32), cu=cu, dtype=np.float64)
    case = case.cast(dtype).but(g=case.g.astype(np.float32), scale=0.25)
    truth = token_loop(case)
    return RecordedCall(
        source="small.safetensors",
        operator="npu_chunk_gated_delta_rule",
        arrays={
            "query": case.q[0],
            "key": case.k[0],
            "value": case.v[0],
            "beta": case.beta[0],
            "initial_state": case.initial_state().swapaxes(2, 3),
            "actual_seq_lengths": np.array(lengths, np.int32),
            "g": case.g[0],
        },
        expected={
            "out": truth.out[0].astype(np.float32),
            "final_state": truth.state.swapaxes(2, 3).astype(np.float32),
        },
        scale=0.25,
        metadata={"note": "a small call"},
    )


POOL_LENGTHS = (3, 0, 2)


def small_pool_call(dtype: Any = np.float16, *, gates: str = "g", state: Any = None) -> RecordedCall:
    """A call over a pool of eight slots, Hk = 1, Hv = 2, Dk = 16, Dv = 32, with references by the float64 loop."""
    case = make_pool_case(93, POOL_LENGTHS, dims=(16, 32), gates=gates, accepted=True, dtype=dtype, state=state)
    truth = pool_loop(case.but(scale=0.25))
    optional = {name: x for name in ("g", "gk") if (x := getattr(case, name)) is not None}
    return RecordedCall(
        source="pool.safetensors",
        operator="npu_recurrent_gated_delta_rule",
        arrays={
            **{name: getattr(case, name) for name in ("query", "key", "value", "beta", "state")},
            "actual_seq_lengths": np.array(POOL_LENGTHS, np.int32),
            "ssm_state_indices": case.slots.astype(np.int32),
            **optional,
            "num_accepted_tokens": np.array(case.accepted, np.int32),
        },
        expected={"out": truth.out.astype(np.float32), "state": truth.pool.astype(np.float32)},
        scale=0.25,
        metadata={"note": "a small call over a pool"},
    )


def entries(call: RecordedCall) -> dict[str, Any]:
    """The arrays and the metadata of a call under the names that they have in a file."""
    expected = {f"expected_{name}": array for name, array in call.expected.items()}
    formats = {"operator": call.operator, "scale": call.scale, "seq_lens_format": call.seq_lens_format}
    return {**call.arrays, **expected, **formats, **call.metadata}


def save_entries(path: Path, values: dict[str, Any]) -> Path:
    """Write entries as they are, right or wrong: safetensors or npz by the name's ending."""
    if path.suffix == ".npz":
        np.savez(path, **values)
        return path
    arrays = {name: np.ascontiguousarray(x) for name, x in values.items() if isinstance(x, np.ndarray)}
    save_file(arrays, path, {name: str(x) for name, x in values.items() if not isinstance(x, np.ndarray)})
    return path
