"""Processors and memory under cgroup limits, from files as the kernel writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from kvasir.model.platform.machine import available_memory, memory_limit, usable_cpus

AFFINITY = len(psutil.Process().cpu_affinity() or []) or os.cpu_count() or 1


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")
    return folder


def quota_v1(folder: str, quota: str) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}


def memory(folder: str, limit: str, usage: str) -> dict[str, str]:
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage}


def memory_v1(folder: str, limit: str, usage: str) -> dict[str, str]:
    names = (f"{folder}/memory.{kind}_in_bytes" for kind in ("limit", "usage"))
    return dict(zip(names, (limit, usage), strict=True))


ONE_CPU = "100000 100000"


@pytest.mark.parametrize(
    ("files", "n_cpus"),
    [
        ({"cpu.max": "max 100000"}, AFFINITY),
        ({"cpu.max": ONE_CPU}, 1),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, min(2, AFFINITY)),
        ({"cpu.max": "99900000 100000"}, AFFINITY),
        (quota_v1("cpu", "-1"), AFFINITY),
        (quota_v1("cpu", "50000"), 1),
        ({}, AFFINITY),
        # systemd's CPUQuota of a service, or of a slice above it.
        ({"self": "0::/a.slice/b", "a.slice/b/cpu.max": ONE_CPU}, 1),
        ({"self": "0::/a/b", "a/cpu.max": ONE_CPU, "a/b/cpu.max": "max 1"}, 1),
        ({"self": "0::/a", "a/cpu.max": "9900000 100000", "cpu.max": ONE_CPU}, 1),
        ({"self": "1:cpu,cpuacct:/a\n0::/"} | quota_v1("cpu/a", "50000"), 1),
        ({"self": "1:cpuset:/a\n0::/b", "a/cpu.max": ONE_CPU}, AFFINITY),
        # A namespace's root is elsewhere, or its own path is not mounted.
        ({"self": "0::/../a", "cpu.max": ONE_CPU}, 1),
        ({"self": "4:cpu:/docker/a"} | quota_v1("cpu", "50000"), 1),
    ],
)
def test_a_cpu_quota_is_rounded_up_and_bounded_by_affinity(
    tmp_path: Path, files: dict[str, str], n_cpus: int
) -> None:
    assert usable_cpus(write(tmp_path, files), tmp_path / "self") == n_cpus


# Reading a model fills the page cache, which must not shrink the KV cache.
CACHED = {"memory.stat": "anon 1000\ninactive_file 2700\nactive_file 200"}
CACHED_V1 = {"memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50"}
LEVELS = {**memory("a/b", "900", "100"), **memory("a", "700", "600"), **memory(".", "max", "700")}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (memory(".", "5000000", "2000000"), 3000000),
        (memory(".", "5000000", "6000000"), 0),
        (memory(".", "4000", "3900") | CACHED, 2800),
        (memory_v1("memory", "700", "300"), 400),
        (memory_v1("memory", "700", "300") | CACHED_V1, 450),
        ({"self": "0::/a/b"} | memory("a/b", "500", "200"), 300),
        ({"self": "0::/a/b"} | LEVELS, 100),
        (
            {"self": "9:memory:/a:b"}
            | memory_v1("memory/a:b", "500", "200")
            | memory_v1("memory", "9223372036854771712", "1"),
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


@pytest.mark.parametrize("files", [{}, memory(".", "max", "1")])
def test_memory_without_a_limit_is_the_machines(tmp_path: Path, files: dict[str, str]) -> None:
    available = psutil.virtual_memory().available
    assert available_memory(write(tmp_path, files), tmp_path / "self") == pytest.approx(
        available, rel=0.2
    )
    assert memory_limit(tmp_path, tmp_path / "self") == psutil.virtual_memory().total
