"""ONNX Runtime tells nobody what is served, and where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_loading_it_leaves_the_home_directory_empty(tmp_path: Path) -> None:
    """Telemetry would keep an identifier and a database there, and look up its host."""
    code = "from model.onnx.runtime import onnxruntime; onnxruntime.SessionOptions()"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORT_")}
    environment = {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
