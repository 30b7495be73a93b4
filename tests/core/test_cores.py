"""Cores that a process may use: quotas of control groups in trees made up here, and the affinity mask."""

import os
from pathlib import Path

import numba
import pytest

from cgdr_numba.core import threads
from cgdr_numba.core.cores import Cores, cores, quota
from cgdr_numba.sched.device import host

V1_MOUNT = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A folder with these files below it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str, limits: dict[str, str], mount: str = V2_MOUNT) -> dict[str, str]:
    """Files of a process in the group `path` of version 2, with ``cpu.max`` of some groups."""
    files = {f"sys/fs/cgroup/{group}/cpu.max": f"{text}\n" for group, text in limits.items()}
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount, **files}


def v1(path: str, limits: dict[str, tuple[str, str]], mount: str = V1_MOUNT) -> dict[str, str]:
    """The same for version 1: (quota, period) in microseconds."""
    files = {"proc/self/cgroup": f"9:memory:/m\n4:cpu,cpuacct:{path}\n0::/\n", "proc/self/mountinfo": mount}
    for group, (time, period) in limits.items():
        folder = f"sys/fs/cgroup/cpu,cpuacct/{group}"
        files |= {f"{folder}/cpu.cfs_quota_us": f"{time}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}
    return files


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v2("/a/b", {"a/b": "150000 100000"}), 1.5),
        (v2("/a/b", {"a/b": "max 100000", "a": "300000 100000"}), 3.0),
        (v2("/a/b", {"a/b": "400000 100000", "a": "50000 100000", ".": "max 100000"}), 0.5),
        (v2("/a/b", {"a/b": "max 100000"}), None),
        (v2("/", {".": "200000 100000"}), 2.0),
        (v2("/a", {"a/other": "100000 100000"}), None),
        (v1("/a/b", {"a/b": ("250000", "100000")}), 2.5),
        (v1("/a/b", {"a/b": ("-1", "100000"), "a": ("100000", "50000")}), 2.0),
        (v1("/a", {"a": ("-1", "100000"), ".": ("-1", "100000")}), None),
        # A container sees its own group as the mount's top, and its path from outside.
        (v1("/docker/x", {".": ("100000", "100000")}, V1_MOUNT.replace(" / /sys", " /docker/x /sys")), 1.0),
        (v1("/docker/x/y", {"y": ("100000", "100000")}, V1_MOUNT.replace(" / /sys", " /docker/x /sys")), 1.0),
        (v2("/docker/x", {".": "100000 100000"}, V2_MOUNT.replace(" / /sys", " /docker/x /sys")), 1.0),
        (v2("/../..", {".": "100000 100000"}), 1.0),
        (v2("/elsewhere", {".": "100000 100000"}, V2_MOUNT.replace(" / /sys", " /docker/x /sys")), 1.0),
    ],
)
def test_quota_is_the_tightest_of_all_levels(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert quota(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/mountinfo": V2_MOUNT},
        {"proc/self/cgroup": "0::a\n::\n\nx\n4:cpu\n", "proc/self/mountinfo": V1_MOUNT + V2_MOUNT},
        {"proc/self/cgroup": "0::/\n4:cpu:/\n", "proc/self/mountinfo": "- cgroup2\n - cgroup2 x y\n\n1 2 3 / - \n"},
        v2("/a", {"a": ""}),
        v2("/a", {"a": "100000"}),
        v2("/a", {"a": "1e5 100000"}),
        v2("/a", {"a": "100000 0"}),
        v2("/a", {"a": "-100000 100000"}),
        v2("/a", {"a": "0 100000"}),
        v2("/a", {"a": "1 2 3"}),
        v1("/a", {"a": ("", "100000")}),
        v1("/a", {"a": ("many", "100000")}),
        v1("/a", {"a": ("100000", "0")}),
    ],
)
def test_odd_files_limit_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    assert quota(tree(tmp_path, files)) is None


def test_files_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    tree(tmp_path, v2("/a", {}))
    (tmp_path / "sys/fs/cgroup/a/cpu.max").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xfe\x00")
    assert quota(tmp_path) is None


@pytest.mark.parametrize(
    ("machine", "affinity", "limit", "usable"),
    [(8, 8, None, 8), (8, 3, None, 3), (8, 8, 2.0, 2), (8, 8, 2.9, 2), (8, 8, 0.25, 1), (8, 2, 6.5, 2), (1, 1, 1e9, 1)],
)
def test_usable_cores(machine: int, affinity: int, limit: float | None, usable: int) -> None:
    assert Cores(machine, affinity, limit).usable == usable


def test_cores_are_this_process_s() -> None:
    assert cores().affinity == len(os.sched_getaffinity(0))
    assert 1 <= cores().usable <= cores().affinity <= cores().machine
    assert cores() is cores()


@pytest.mark.slow
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads")
def test_a_quota_below_numba_s_number_limits_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: Cores(8, 8, 1.5))
    before = numba.get_num_threads()
    assert threads.current_threads() == 1
    with threads.numba_threads(None) as n:
        assert (n, numba.get_num_threads()) == (1, 1)
    with threads.numba_threads(2) as n:
        assert (n, numba.get_num_threads()) == (2, 2), "threads= may exceed the default"
    assert numba.get_num_threads() == before


def test_the_host_has_the_usable_cores() -> None:
    assert host().cores == cores().usable
