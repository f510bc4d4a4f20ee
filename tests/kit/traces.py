"""What exports need once a session: PyTorch's operators, and graphs of networks already traced."""

from __future__ import annotations

import gc
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn
from torch._export import utils as export_utils
from torch.onnx import ONNXProgram
from torch.onnx._internal._lazy_import import onnxscript_apis  # type: ignore[attr-defined]
from torch.onnx._internal.exporter import _decomp
from torch.onnx._internal.exporter._registration import ONNXRegistry


def trace_networks_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let PyTorch trace networks of equal structure once: most of an export.

    folder: for their graphs, which have no weights of their own (`kvasir.export.graphs.trace`).
    Several processes may share it.
    """
    trace = torch.onnx.export

    def once(module: nn.Module, arguments: tuple[Tensor, ...], **options: Any) -> ONNXProgram:
        parts = [
            (name, type(part), {key: value for key, value in vars(part).items() if key[0] != "_"})
            for name, part in module.named_modules()
        ]
        weights = [(name, w.dtype, w.shape) for name, w in module.state_dict().items()]
        given = [(argument.dtype, argument.shape) for argument in arguments]
        key = re.sub(" at 0x[0-9a-f]+", "", repr((parts, weights, given, options)))  # functions
        path = folder / f"traced-{hashlib.sha256(key.encode()).hexdigest()}.onnx"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                program = trace(module, arguments, **options)
                assert program is not None
                onnx_ir.save(program.model, path)
        return ONNXProgram(onnx_ir.load(path), None)

    patch.setattr(torch.onnx, "export", once)


def list_operators_once(patch: pytest.MonkeyPatch) -> None:
    """Let PyTorch list its operators once: an export takes a third less."""
    decompositions = cache(_decomp.create_onnx_friendly_decomposition_table)
    gc.freeze()  # what is imported by now stays, and need not be looked at again
    patch.setattr(onnxscript_apis, "get_torchlib_ops", cache(onnxscript_apis.get_torchlib_ops))
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    patch.setattr(
        _decomp,
        "create_onnx_friendly_decomposition_table",
        lambda operators: decompositions(frozenset(operators)),
    )
    once = cache(export_utils._materialize_cpp_cia_ops)
    patch.setattr(export_utils, "_materialize_cpp_cia_ops", once)
