"""Processors and memory under cgroup limits, from files as the kernel writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from model.machine import available_memory, memory_limit, usable_cpus

AFFINITY = len(psutil.Process().cpu_affinity() or []) or os.cpu_count() or 1
V1_LIMIT, V1_USAGE = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")
    return folder


@pytest.mark.parametrize(
    ("files", "n_cpus"),
    [
        ({"cpu.max": "max 100000"}, AFFINITY),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, min(2, AFFINITY)),
        ({"cpu.max": "99900000 100000"}, AFFINITY),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, AFFINITY),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, AFFINITY),
        # systemd's CPUQuota of a service, or of a slice above it.
        ({"self": "0::/a.slice/b", "a.slice/b/cpu.max": "100000 100000"}, 1),
        (
            {
                "self": "0::/a.slice/b",
                "a.slice/cpu.max": "100000 100000",
                "a.slice/b/cpu.max": "max 1",
            },
            1,
        ),
        ({"self": "0::/a", "a/cpu.max": "9900000 100000", "cpu.max": "100000 100000"}, 1),
        (
            {
                "self": "1:cpu,cpuacct:/a\n0::/",
                "cpu/a/cpu.cfs_quota_us": "50000",
                "cpu/a/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"self": "1:cpuset:/a\n0::/b", "a/cpu.max": "100000 100000"}, AFFINITY),
        # A namespace's root is elsewhere, or its own path is not mounted.
        ({"self": "0::/../a", "cpu.max": "100000 100000"}, 1),
        (
            {
                "self": "4:cpu:/docker/a",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
)
def test_a_cpu_quota_is_rounded_up_and_bounded_by_affinity(
    tmp_path: Path, files: dict[str, str], n_cpus: int
) -> None:
    assert usable_cpus(write(tmp_path, files), tmp_path / "self") == n_cpus


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "5000000", "memory.current": "2000000"}, 3000000),
        ({"memory.max": "5000000", "memory.current": "6000000"}, 0),
        # Reading a model fills the page cache, which must not shrink the KV cache.
        (
            {
                "memory.max": "4000",
                "memory.current": "3900",
                "memory.stat": "anon 1000\ninactive_file 2700\nactive_file 200",
            },
            2800,
        ),
        ({V1_LIMIT: "700", V1_USAGE: "300"}, 400),
        (
            {
                V1_LIMIT: "700",
                V1_USAGE: "300",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
            },
            450,
        ),
        ({"self": "0::/a/b", "a/b/memory.max": "500", "a/b/memory.current": "200"}, 300),
        (  # the least of all levels
            {
                "self": "0::/a/b",
                "a/b/memory.max": "900",
                "a/b/memory.current": "100",
                "a/memory.max": "700",
                "a/memory.current": "600",
                "memory.max": "max",
                "memory.current": "700",
            },
            100,
        ),
        (
            {
                "self": "9:memory:/a:b",
                "memory/a:b/memory.limit_in_bytes": "500",
                "memory/a:b/memory.usage_in_bytes": "200",
                V1_LIMIT: "9223372036854771712",
                V1_USAGE: "1",
            },
            300,
        ),
    ],
)
def test_memory_is_what_the_cgroup_leaves(tmp_path: Path, files: dict[str, str], left: int) -> None:
    assert available_memory(write(tmp_path, files), tmp_path / "self") == left
    limits = [
        int(text) for name, text in files.items() if re.search("max|limit", name) and text != "max"
    ]
    assert memory_limit(tmp_path, tmp_path / "self") == min(limits)


@pytest.mark.parametrize("files", [{}, {"memory.max": "max", "memory.current": "1"}])
def test_memory_without_a_limit_is_the_machines(tmp_path: Path, files: dict[str, str]) -> None:
    available = psutil.virtual_memory().available
    assert available_memory(write(tmp_path, files), tmp_path / "self") == pytest.approx(
        available, rel=0.2
    )
    assert memory_limit(tmp_path, tmp_path / "self") == psutil.virtual_memory().total
