"""Torch's number of threads and numba's are two settings, and calls of either leave both as they were."""

import numba
import pytest

import cgdr_numba

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("asked", [None, 1, 2])
def test_settings_stay(asked: int | None) -> None:
    if (asked or 1) > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("one core")
    before = torch.get_num_threads()
    q, v = torch.randn(2, 40, 4, 64), torch.randn(2, 40, 8, 64)
    gates = torch.rand(2, 40, 8)
    expected, _ = cgdr_numba.chunk_gated_delta_rule(q, q, v, -gates, gates, use_qk_l2norm_in_kernel=True)
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            numba.set_num_threads(1)
            for _ in range(3):
                product = q.flatten(1) @ v.flatten(1).T[: 40 * 256]
                out, _ = cgdr_numba.chunk_gated_delta_rule(
                    q, q, v, -gates, gates, use_qk_l2norm_in_kernel=True, threads=asked
                )
                assert torch.equal(out, expected)
                assert product.shape == (2, 2)
            assert (torch.get_num_threads(), numba.get_num_threads()) == (n_threads, 1)
    finally:
        torch.set_num_threads(before)
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
