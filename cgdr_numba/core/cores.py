"""How many cores this process may use: its affinity mask, and the quota of the container that it runs in."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Cores(NamedTuple):
    """What the system grants this process."""

    machine: int
    """Cores of the machine."""
    affinity: int
    """Cores that the process may be scheduled on."""
    quota: float | None
    """Cores' worth of time that its control groups grant; None where nothing limits it."""

    @property
    def usable(self) -> int:
        """Threads that can run at once: within the mask, and within whole cores of the quota, at least 1.

        A quota is rounded down: threads beyond it use up its time early in a period, and then all of them stand still
        until the next, for as much as 100 ms.
        """
        granted = self.affinity if self.quota is None else min(self.affinity, int(self.quota))
        return max(1, granted)


@functools.cache
def cores() -> Cores:
    """Return what the system grants this process, read once in a process."""
    n_machine = os.cpu_count() or 1
    n_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n_machine
    return Cores(n_machine, n_allowed, quota(Path("/")))


if hasattr(os, "register_at_fork"):
    # Forked workers are often tied to cores of their own.
    os.register_at_fork(after_in_child=cores.cache_clear)


def quota(root: Path) -> float | None:
    """Return the cores' worth of time of the tightest control group around this process; None without a limit.

    `root` is the folder that holds proc and, below the mount points named there, the groups (version 1 and 2). Files
    that are missing or odd limit nothing.
    """
    limits = [limit for folder in _groups(root) for limit in (_limit_v2(folder), _limit_v1(folder)) if limit]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folder of every group with a say in processor time: this process's own and all above it."""
    paths = dict(_own_paths(root))
    for kind, base, mount in _mounts(root):
        path = paths.get(kind)
        if path is None:
            continue
        # The mount shows the tree from `base` on; a process outside of it counts as at its top.
        inside = [part for part in os.path.relpath(path, base).split("/") if part != "."]
        steps = [] if ".." in inside else inside
        folder = root / mount.lstrip("/")
        for i in range(len(steps) + 1):
            yield folder.joinpath(*steps[:i])


def _own_paths(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (kind, path) of the groups of this process, out of lines like ``4:cpu,cpuacct:/a`` and ``0::/a``."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/"):
            if number == "0" and not controllers:
                yield "cgroup2", path
            elif "cpu" in controllers.split(","):
                yield "cgroup", path


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, path within the tree of groups, mount point) of where such trees are mounted."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        first, _, second = line.partition(" - ")
        where, what = first.split(" "), second.split(" ")
        if len(where) < 6 or len(what) < 3 or not where[3].startswith("/"):
            continue
        if what[0] == "cgroup2" or (what[0] == "cgroup" and "cpu" in what[2].split(",")):
            yield what[0], where[3], where[4].replace("\\040", " ")


def _limit_v2(folder: Path) -> float | None:
    """Return the limit of ``cpu.max``, whose text is ``max 100000`` or ``150000 100000``."""
    given = _text(folder / "cpu.max").split()
    return _ratio(*given) if len(given) == 2 else None


def _limit_v1(folder: Path) -> float | None:
    """Return the limit of ``cpu.cfs_quota_us``, which is -1 for none."""
    return _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _ratio(time: str, period: str) -> float | None:
    """Return time / period where both are positive integers."""
    try:
        granted, whole = int(time), int(period)
    except ValueError:
        return None
    return granted / whole if granted > 0 and whole > 0 else None


def _text(path: Path) -> str:
    """Return a file's text; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
