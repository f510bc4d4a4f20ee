"""What this process may use of the machine: processors and memory, as cgroups (v2 or v1) and affinity limit them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

SPIN_MICROSECONDS = (
    100  # that a thread with nothing to compute keeps its processor, unless told otherwise
)

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """The smaller of the scheduler's affinity and the cgroup's CPU quota, rounded up: a pod's limit is not its node."""
    affinity = (
        len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1
    )
    quota = _cpu_quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that may still be taken: the machine's available memory, or what the cgroup leaves if that is less.

    Files that the page cache holds and nobody uses are not counted as taken: the kernel drops them when asked.
    """
    available = int(psutil.virtual_memory().available)
    left = _cgroup_memory_left(cgroup)
    return available if left is None else min(available, left)


def _cpu_quota(cgroup: Path) -> float | None:
    limit = _read(cgroup / "cpu.max")  # "200000 100000", or "max 100000"
    if limit is not None:
        quota, _, period = limit.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota_v1, period_v1 = (
        _read(cgroup / "cpu/cpu.cfs_quota_us"),
        _read(cgroup / "cpu/cpu.cfs_period_us"),
    )
    if quota_v1 is None or period_v1 is None or int(quota_v1) <= 0:
        return None
    return int(quota_v1) / int(period_v1)


def _cgroup_memory_left(cgroup: Path) -> int | None:
    for limit_file, usage_file, stat_file, idle_field in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _read(cgroup / limit_file), _read(cgroup / usage_file)
        if limit is not None and limit != "max" and usage is not None:
            fields = dict(line.split() for line in (_read(cgroup / stat_file) or "").splitlines())
            return max(0, int(limit) - int(usage) + int(fields.get(idle_field, 0)))
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
