"""ONNX Runtime sessions: the server's only import of onnxruntime."""

from __future__ import annotations

import os
from pathlib import Path

from onnxruntime import InferenceSession, OrtValue, SessionOptions

from model.bundle import GRAPH_ENVIRONMENT

__all__ = ["InferenceSession", "OrtValue", "open_session"]


def open_session(graph: Path, threads: int, spin_microseconds: int) -> InferenceSession:
    """A session on the CPU. spin_microseconds: how long a thread with nothing to compute keeps its processor."""
    os.environ.update(GRAPH_ENVIRONMENT)  # ONNX Runtime reads it when the session is built
    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin_microseconds > 0)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(max(1, spin_microseconds)))
    options.add_session_config_entry("session.force_spinning_stop", "1")  # nobody spins between two runs
    return InferenceSession(graph, options, providers=["CPUExecutionProvider"])
