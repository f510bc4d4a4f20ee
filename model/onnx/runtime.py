"""ONNX Runtime without telemetry; only this file imports it, since it reads its settings then."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

# Telemetry starts when the library loads, whatever is called afterwards: it writes a database to
# the home directory and looks up its maker's host for ever. The flash path of attention gives other
# bits for other ways of cutting a prompt into chunks.
os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}

import onnxruntime

__all__ = ["onnxruntime", "open_cpu_session"]

onnxruntime.disable_telemetry_events()

# Flags of x86 processors that add the products of uint8 and int8 in 32 bits.
_VNNI = re.compile(r"^flags\s*:.*\bavx(512)?_vnni\b", re.MULTILINE)


def open_cpu_session(
    graph: Path | bytes,
    threads: int = 0,
    entries: Mapping[str, object] | None = None,
    *,
    library: Callable[[onnxruntime.SessionOptions], object] | None = None,
    plans_memory: bool = True,
    fits_16_bits: bool = False,
) -> onnxruntime.InferenceSession:
    """Open a session on the CPU whose products of integers are exact.

    threads: 0 is one for each core. entries: of the session's configuration, by name. library:
    registers operators that the graph needs.
    plans_memory: keep a plan of memory for each shape of the inputs, of which there should be few.
    fits_16_bits: as the manifest has it.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = plans_memory
    # x86 without VNNI adds pairs of products of uint8 and int8 in 16 bits, which overflow. With
    # this, ONNX Runtime makes the weights uint8, whose kernel adds in 32 bits; with VNNI that one
    # is slower, and not needed.
    exact = {"session.x64quantprecision": int(not (fits_16_bits or _has_vnni()))}
    for name, value in (exact | dict(entries or {})).items():
        options.add_session_config_entry(name, str(value))
    if library is not None:
        library(options)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@cache
def _has_vnni() -> bool:
    """Return whether this processor has VNNI; False where Linux does not say so."""
    try:
        return _VNNI.search(Path("/proc/cpuinfo").read_text()) is not None
    except OSError:
        return False
