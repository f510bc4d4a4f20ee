"""Processors and memory: those that this process may use, and those that it gives back.

Limits are of cgroups (v2 or v1) and affinity.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from kvasir.model.platform.limited_process import peak_kib

_NICENESS = 5  # of an encoder beside streams: Linux gives it a third of a stream's time
_C = ctypes.CDLL(None) if sys.platform == "linux" else None

_CGROUP = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")
_MEMORY_FILES = (  # of v2 and v1: limit, usage, and the field of unused page cache
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_cpus(cgroup: Path = _CGROUP, of_process: Path = _OF_PROCESS) -> int:
    """Return the scheduler's affinity or the least CPU quota, rounded up, if that is less."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    n_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for level in _levels(cgroup, of_process, "cpu"):
        limit = _read(level / "cpu.max")  # "200000 100000", or "max 100000"
        if not limit:  # v1, where -1 is no limit
            limit = f"{_read(level / 'cpu.cfs_quota_us')} {_read(level / 'cpu.cfs_period_us')}"
        quota, _, period = limit.partition(" ")
        if quota.isdigit():
            n_cpus = min(n_cpus, math.ceil(int(quota) / int(period)))
    return max(1, n_cpus)


def processor_name(described: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name; its architecture where Linux does not say more."""
    text = described.read_text(encoding="utf-8") if described.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def available_memory(cgroup: Path = _CGROUP, of_process: Path = _OF_PROCESS) -> int:
    """Return the available memory in bytes, of the machine or a cgroup, whichever is least.

    Page cache that is not in use does not count as taken: the kernel drops it on demand.
    """
    available = int(psutil.virtual_memory().available)
    for level in _levels(cgroup, of_process, "memory"):
        for limit_file, usage_file, idle_field in _MEMORY_FILES:
            limit, usage = _read(level / limit_file), _read(level / usage_file)
            if limit.isdigit() and usage:
                statistics = _read(level / "memory.stat")
                fields = dict(line.split() for line in statistics.splitlines())
                left = int(limit) - int(usage) + int(fields.get(idle_field, 0))
                available = min(available, max(0, left))
    return available


def memory_limit(cgroup: Path = _CGROUP, of_process: Path = _OF_PROCESS) -> int:
    """Return the memory in bytes that the machine has, or that a cgroup may take, if less."""
    files = [name for name, *_ in _MEMORY_FILES]
    levels = _levels(cgroup, of_process, "memory")
    limits = [_read(level / name) for level in levels for name in files]
    total = int(psutil.virtual_memory().total)
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _levels(cgroup: Path, of_process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, in v2 and v1.

    The roots are among them, because a container may see only its own cgroup, as the root.
    """
    for line in [*_read(of_process).splitlines(), "0::/", f"1:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        inside = PurePosixPath(path.lstrip("/"))
        if ".." not in inside.parts and controller in (controllers or controller).split(","):
            root = cgroup / controller if controllers else cgroup
            yield from (root / level for level in (inside, *inside.parents))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def yield_to_streams() -> None:
    """Let this thread and those that it will start run less often than threads of streams."""
    if sys.platform == "linux":  # elsewhere the whole process would yield
        os.nice(_NICENESS)


def resident_memory() -> int:
    """Return the memory in bytes that this process has now."""
    return int(psutil.Process().memory_info().rss)


def restart_peak() -> None:
    """Let `peak_memory` begin with now; only Linux can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int:
    """Return the most memory in bytes since `restart_peak`; elsewhere than on Linux that of now."""
    return peak_kib() * 1024 if sys.platform == "linux" else resident_memory()


def return_freed_memory() -> None:
    """Return memory that was freed to the operating system; glibc would keep much of it."""
    if trim := getattr(_C, "malloc_trim", None):
        trim(0)
