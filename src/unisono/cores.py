"""How many cores this process may use: its affinity mask, and the CPU quota of its container."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def usable_cores(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the cores of the affinity mask, lowered to the cgroup's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(membership, root))]))


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """Yield the quota, in cores, of every cgroup (v1 or v2) that this process is in, up to the root."""
    if not membership.is_file():
        return
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(root, path):
                yield from _quota_v2(folder / "cpu.max")
        elif "cpu" in controllers.split(","):
            for name in {controllers, "cpu"}:
                for folder in _upwards(root / name, path):
                    yield from _quota_v1(folder)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield ``root/path`` and its parents down to ``root``: a container often sees the host's path but its own root."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _quota_v2(file: Path) -> Iterator[float]:
    if file.is_file():
        quota, period = file.read_text(encoding="ascii").split()
        if quota != "max":
            yield int(quota) / int(period)


def _quota_v1(folder: Path) -> Iterator[float]:
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if quota.is_file() and period.is_file() and int(quota.read_text(encoding="ascii")) > 0:
        yield int(quota.read_text(encoding="ascii")) / int(period.read_text(encoding="ascii"))
