"""Processors and memory under cgroup limits, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from server.engine.machine import available_memory, usable_cpus


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_max", ".max").replace(
            "_current", ".current"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", None), ("100000 100000", 1), ("5000 100000", 1)]
)
def test_cpu_quota_v2(tmp_path: Path, limit: str, expected: int | None) -> None:
    affinity = len(psutil.Process().cpu_affinity() or [])
    assert usable_cpus(write(tmp_path, cpu_max=limit)) == (
        affinity if expected is None else expected
    )


def test_a_quota_is_rounded_up_and_bounded_by_affinity(tmp_path: Path) -> None:
    affinity = len(psutil.Process().cpu_affinity() or [])
    assert usable_cpus(write(tmp_path, cpu_max="150000 100000")) == min(2, affinity)
    assert usable_cpus(write(tmp_path, cpu_max="99900000 100000")) == affinity


@pytest.mark.parametrize(("quota", "limited"), [("-1", False), ("50000", True)])
def test_cpu_quota_v1(tmp_path: Path, quota: str, limited: bool) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    affinity = len(psutil.Process().cpu_affinity() or [])
    assert usable_cpus(tmp_path) == (1 if limited else affinity)


def test_memory_is_what_the_cgroup_leaves(tmp_path: Path) -> None:
    assert (
        available_memory(write(tmp_path, memory_max="5000000", memory_current="2000000")) == 3000000
    )
    assert available_memory(write(tmp_path, memory_max="5000000", memory_current="6000000")) == 0


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    available = psutil.virtual_memory().available
    assert available_memory(write(tmp_path, memory_max="max", memory_current="1")) == pytest.approx(
        available, rel=0.2
    )
    assert available_memory(tmp_path / "absent") == pytest.approx(available, rel=0.2)


def test_unused_page_cache_is_not_counted_as_taken(tmp_path: Path) -> None:
    """Reading a model fills the cache; the budget for keys and values must not shrink by it."""
    write(tmp_path, memory_max="4000", memory_current="3900")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 2700\nactive_file 200\n")
    assert available_memory(tmp_path) == 4000 - 3900 + 2700


def test_memory_v1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("700")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("300")
    assert available_memory(tmp_path) == 400
    (tmp_path / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50\n")
    assert available_memory(tmp_path) == 450
