"""Rows past the caches have the bits of ordinary stores, and only whole lines go that way."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cgdr_numba import chunk_gated_delta_rule
from cgdr_numba.core import memory
from cgdr_numba.core.dtypes import KINDS, as_words
from cgdr_numba.core.fast import convert, launch, stream
from cgdr_numba.core.jit import kernel

_rows, _finish = stream.stream_rows, stream.finish_streams


@kernel
def stream_and_finish(x, kind, words):
    _rows(x, kind, words)
    _finish()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(("n", "first", "gap"), [(128, 0, 0), (32, 64, 64), (16, 0, 0), (33, 0, 31), (128, 2, 0)])
def test_rows_are_rounded_as_ordinary_ones(dtype: Any, n: int, first: int, gap: int) -> None:
    m, kind = 5, KINDS[np.dtype(dtype)]
    x = np.random.default_rng(n).standard_normal((m, n)).astype(np.float32)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, 1e-40
    both = []
    for write in (stream_and_finish, convert.narrow_rows):
        page = memory.empty((m, first + n + gap), dtype)
        page[...] = -3
        with np.errstate(all="ignore"):
            write(x, kind, as_words(page[:, first : first + n]))
        both.append(page)
    assert both[0].tobytes() == both[1].tobytes()
    assert np.all(np.delete(both[0], np.s_[first : first + n], axis=1) == -3), "nothing is written beside the rows"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_streaming_changes_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 50, 2, 48)).astype(dtype)
    g, beta = -rng.random((1, 50, 2)), rng.random((1, 50, 2))
    results = []
    for limit in (0, 2**40):
        for name in ("STREAMED_BYTES", "SHARED_STREAMED_BYTES"):
            monkeypatch.setattr(launch, name, limit)
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        results.append(out.tobytes())
    assert results[0] == results[1]
