"""The processors and memory that cgroups (v2 or v1) and affinity leave to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FILES = (  # of v2 and v1: folder, limit, usage, and the field of unused page cache
    (".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Return the scheduler's affinity or the cgroup's CPU quota, rounded up, if that is less."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    n_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    limit = _read(cgroup / "cpu.max")  # "200000 100000", or "max 100000"
    if not limit:
        quota_v1 = _read(cgroup / "cpu/cpu.cfs_quota_us")  # -1 is no limit
        limit = f"{quota_v1 or -1} {_read(cgroup / 'cpu/cpu.cfs_period_us') or 1}"
    quota, period = limit.replace("max", "-1").split()
    return n_cpus if int(quota) <= 0 else min(n_cpus, math.ceil(int(quota) / int(period)))


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Return the available memory in bytes, of the machine or the cgroup, whichever is less.

    Page cache that is not in use does not count as taken: the kernel drops it on demand.
    """
    available = int(psutil.virtual_memory().available)
    for folder, limit_file, usage_file, idle_field in _MEMORY_FILES:
        limit, usage = _read(cgroup / folder / limit_file), _read(cgroup / folder / usage_file)
        if limit.isdigit() and usage:
            statistics = _read(cgroup / folder / "memory.stat")
            fields = dict(line.split() for line in statistics.splitlines())
            left = int(limit) - int(usage) + int(fields.get(idle_field, 0))
            return min(available, max(0, left))
    return available


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
