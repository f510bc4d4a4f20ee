"""CUDA sessions without a GPU: the binding, on the CPU, and the errors where there is none."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.paged_graph import export_paged_graph
from model.config import TransformerConfig
from model.onnx.runtime import onnxruntime
from server.engine.cuda import session as session_module
from server.engine.cuda.runtime import NoDeviceError, free_memory
from server.engine.cuda.session import DeviceModel, block_bytes, open_cuda_session
from server.engine.session import check_shape, open_session
from tests.random_models import make_config, make_decoder


class HostBuffer:
    def __init__(self, n_bytes: int) -> None:
        self.array = np.zeros(n_bytes, dtype=np.uint8)
        self.address = self.array.ctypes.data


NO_GPU = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="says what is said where there is none",
)


def write_graph(path: Path, dtype: int) -> None:
    """Logits are the ids; each present block is the past's shape, filled with the first id."""
    value, node, int64 = helper.make_tensor_value_info, helper.make_node, TensorProto.INT64
    past, present, nodes = [], [], []
    for part in ("key", "value"):
        shape: list[str | int | None] = ["n", 2, 1, 3]
        past.append(value(f"past_key_values.0.{part}", dtype, shape))
        present.append(value(f"present.0.{part}", dtype, shape))
        nodes += [
            node("Gather", ["input_ids", "first"], [f"id.{part}"]),
            node("Cast", [f"id.{part}"], [f"cast.{part}"], to=dtype),
            node("Shape", [past[-1].name], [f"shape.{part}"]),
            node("Expand", [f"cast.{part}", f"shape.{part}"], [present[-1].name]),
        ]
    nodes.append(node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes,
        "blocks",
        [value("input_ids", int64, ["tokens"]), *past],
        [value("logits", TensorProto.FLOAT, ["tokens"]), *present],
        [helper.make_tensor("first", int64, [], [0])],
    )
    opsets = [helper.make_opsetid("", 23)]
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opsets), path)


@pytest.mark.parametrize(("dtype", "itemsize"), [(TensorProto.FLOAT, 4), (TensorProto.FLOAT16, 2)])
def test_ids_go_in_logits_come_out_and_blocks_stay(
    dtype: int, itemsize: int, tmp_path: Path
) -> None:
    write_graph(tmp_path / "model.onnx", dtype)
    session = open_session(tmp_path / "model.onnx", threads=1, spin_microseconds=0)
    assert block_bytes(session) == 2 * 2 * 3 * itemsize
    buffers: list[HostBuffer] = []

    def allocate(n_bytes: int) -> HostBuffer:
        buffers.append(HostBuffer(n_bytes))
        return buffers[-1]

    model = DeviceModel(session, n_blocks=5, device="cpu", buffer=allocate)
    for ids in ([7, 8, 9], [4], [5, 6]):
        logits = model.run({"input_ids": np.array(ids)})
        assert logits.tolist() == ids
        held = [
            buffer.array.view(np.float32 if itemsize == 4 else np.float16) for buffer in buffers
        ]
        assert len(held) == 2
        assert all(blocks.size == 5 * 2 * 3 and (blocks == ids[0]).all() for blocks in held)


@NO_GPU
def test_no_gpu_is_said_and_not_replaced_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With ONNX Runtime for the CPU; for GPUs without a driver; for GPUs with a useless driver.

    The graph is a real one, for which the CPU has no kernels.
    """
    graph = tmp_path / "model.onnx"
    decoder = make_decoder(make_config(n_layer=1))
    export_paged_graph(decoder.config, decoder.state_dict(), graph, "bf16")
    with pytest.raises(
        NoDeviceError, match="is the one for the CPU; install the extra cuda in its place"
    ):
        open_cuda_session(graph)
    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("libcublas.so not found"))  # noqa: T201
    with pytest.raises(
        NoDeviceError, match=r"CUDA's runtime cannot be loaded|no NVIDIA GPU can be used"
    ):
        open_cuda_session(graph)
    monkeypatch.setattr(session_module, "free_memory", lambda: 2**30)
    with pytest.raises(
        NoDeviceError, match=r"cannot run the model on this GPU: .*implementation"
    ) as caught:
        open_cuda_session(graph)
    assert "\n" not in str(caught.value)
    write_graph(graph, TensorProto.FLOAT)  # the CPU could run this one
    with pytest.raises(NoDeviceError, match="finds no NVIDIA GPU that it can use"):
        open_cuda_session(graph)
    assert capfd.readouterr() == ("", "")


@NO_GPU
def test_the_memory_of_no_gpu_cannot_be_read() -> None:
    with pytest.raises(
        NoDeviceError, match=r"CUDA's runtime cannot be loaded|no NVIDIA GPU can be used"
    ):
        free_memory()


def test_the_extra_for_gpus_brings_what_onnxruntime_links_and_nothing_else() -> None:
    """`readelf -d libonnxruntime_providers_cuda.so` names cublas (and cublasLt), curand, cudart.

    The wheel's own extra lacks cuBLAS, and two ONNX Runtimes would overwrite each other.
    """
    project = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    names = {
        extra: {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    assert names["cuda"] == {
        "nvidia-cublas",
        "nvidia-cuda-runtime",
        "nvidia-curand",
        "onnxruntime-gpu",
    }
    assert names["cpu"] == {"onnxruntime"}
    others = set().union(
        *(brought for extra, brought in names.items() if extra not in {"cpu", "cuda"})
    )
    assert not {"onnxruntime", "onnxruntime-gpu"} & others


@pytest.mark.parametrize("change", [{"vocab_size": 4096}, {"n_layer": 5}, {"vocab_size": 8}])
def test_a_graph_of_another_shape_than_its_configuration_is_refused(
    change: dict[str, Any],
) -> None:
    """Buffers have the configuration's shape, and a run writes to raw addresses."""
    directory = Path(__file__).parents[2] / "examples/stdlib"
    config = TransformerConfig.load(directory / "config.json")
    session = open_session(directory / "model.onnx", threads=1, spin_microseconds=0)
    check_shape(session, config)
    with pytest.raises(ValueError, match=r"the graph has 2048 tokens and 4 layers, and config"):
        check_shape(session, replace(config, **change, eos_token_ids=(), bos_token_id=None))
