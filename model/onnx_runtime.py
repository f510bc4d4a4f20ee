"""ONNX Runtime without telemetry; only this file imports it, since it reads its settings then."""

from __future__ import annotations

import os

# Telemetry starts when the library loads, whatever is called afterwards: it writes a database to
# the home directory and looks up its maker's host for ever. The flash path of attention gives other
# bits for other ways of cutting a prompt into chunks.
os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}

import onnxruntime

__all__ = ["onnxruntime"]

onnxruntime.disable_telemetry_events()
