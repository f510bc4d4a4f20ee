"""CUDA sessions without a GPU: the binding, on the CPU, and the errors where there is none."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kvasir.kernels.library import FILE, Library
from kvasir.model.config import TransformerConfig
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.server.engine.gpu import cuda, webgpu
from kvasir.server.engine.gpu.cuda import bind_cuda_blocks, open_cuda_session
from kvasir.server.engine.gpu.cuda_runtime import (
    DeviceBuffer,
    NoDeviceError,
    check_capability,
    free_memory,
)
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.session import block_bytes
from kvasir.server.engine.session import check_shape, open_session
from tests.kernels.graphs import needs_library, norm_graph
from tests.kit.numpy_session import HostBuffer

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

    bind = partial(bind_cuda_blocks, device="cpu", buffer=allocate)
    model = DeviceModel(session, n_blocks=5, bind_blocks=bind)
    for ids in ([7, 8, 9], [4], [5, 6]):
        logits = model.run({"input_ids": np.array(ids), "slot_mapping": np.array([0])})
        assert logits[:].tolist() == ids
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

    The CPU has no kernels for the graph.
    """
    graph = tmp_path / "model.onnx"
    write_graph(graph, TensorProto.BFLOAT16)
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
    monkeypatch.setattr(cuda, "check_capability", lambda: None)
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


class FakeRuntime:
    """CUDA's runtime library on a GPU of some compute capability; `calls` are the functions'."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self._capability = iter(capability)
        self.calls: list[str] = []

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(function)
            if function == "cudaDeviceGetAttribute":
                arguments[0]._obj.value = next(self._capability)
            return 0

        return call


def test_cleared_blocks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's stream could write to them before they are zero."""
    runtime = FakeRuntime()
    monkeypatch.setattr("kvasir.server.engine.gpu.cuda_runtime._library", lambda: runtime)
    blocks = DeviceBuffer(256)
    assert runtime.calls == ["cudaMalloc", "cudaMemset", "cudaDeviceSynchronize"]
    del blocks
    assert runtime.calls[3:] == ["cudaFree"]


@pytest.mark.parametrize(
    ("capability", "is_known"),
    [((9, 0), True), ((8, 6), True), ((7, 5), True), ((7, 0), False), ((10, 0), False)],
)
def test_a_gpu_without_machine_code_is_refused(
    capability: tuple[int, int], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(capability)
    monkeypatch.setattr("kvasir.server.engine.gpu.cuda_runtime._library", lambda: runtime)
    if is_known:
        check_capability()
        return
    with pytest.raises(NoDeviceError, match=rf"capability {capability[0]}\.{capability[1]}"):
        check_capability()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A plugin for WebGPU that is not registered yet."""
    fake = SimpleNamespace(
        get_ep_name=lambda: "WebGpuExecutionProvider", get_library_path=lambda: "webgpu.so"
    )
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", fake)
    webgpu._find_device.cache_clear()
    return fake


@pytest.mark.usefixtures("plugin")
def test_webgpu_without_a_plugin_or_an_adapter_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would run the graph on the CPU, or say nothing of devices."""
    registered: list[tuple[str, str]] = []
    monkeypatch.setattr(
        onnxruntime,
        "register_execution_provider_library",
        lambda name, path: registered.append((name, path)),
    )
    with pytest.raises(NoDeviceError, match="WebGPU finds no adapter"):
        webgpu.require_webgpu()
    assert registered == [("WebGpuExecutionProvider", "webgpu.so")]
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    with pytest.raises(NoDeviceError, match="install the extra webgpu"):
        webgpu.require_webgpu()


@pytest.mark.usefixtures("plugin")
def test_webgpu_never_runs_a_node_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An adapter that knows none of the graph's operators leaves them to the CPU."""
    write_graph(tmp_path / "model.onnx", TensorProto.FLOAT16)
    (cpu,) = onnxruntime.get_ep_devices()
    monkeypatch.setattr(webgpu, "_find_device", lambda: cpu)
    with pytest.raises(NoDeviceError, match=r"cannot run the model on this GPU: .*fallback") as e:
        webgpu.open_webgpu_session(tmp_path / "model.onnx")
    assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")


def test_the_extra_for_gpus_brings_what_onnxruntime_links_and_nothing_else() -> None:
    """`readelf -d libonnxruntime_providers_cuda.so` names cublas (and cublasLt), curand, cudart.

    The wheel's own extra lacks cuBLAS, and two ONNX Runtimes would overwrite each other. They are
    pinned with torch's own versions, so that one environment can hold both.
    """
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {
        extra: {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    linked = {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-curand"}
    assert names["cuda"] == linked | {"onnxruntime-gpu"}
    assert names["cpu"] == {"onnx", "onnxruntime"}
    others = set().union(*(names[extra] for extra in names.keys() - {"cpu", "cuda", "webgpu"}))
    assert not {"onnxruntime", "onnxruntime-gpu"} & others
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(line.split("==") for line in text.splitlines()[1:])
    assert linked | {"nvidia-cuda-nvrtc", "onnxruntime-gpu"} <= pinned.keys()
    assert pinned["onnxruntime-gpu"] == pinned["onnxruntime"]


@pytest.mark.parametrize("change", [{"vocab_size": 4096}, {"n_layer": 5}, {"vocab_size": 8}])
def test_a_graph_of_another_shape_than_its_configuration_is_refused(change: dict[str, Any]) -> None:
    """Buffers have the configuration's shape, and a run writes to raw addresses."""
    directory = Path(__file__).parents[2] / "examples/stdlib"
    config = TransformerConfig.load(directory / "config.json")
    session = open_session(directory / "model.onnx", threads=1, spin_microseconds=0)
    check_shape(session, config)
    with pytest.raises(ValueError, match=r"the graph has 2048 tokens and 4 layers, and config"):
        check_shape(session, replace(config, **change, eos_token_ids=(), bos_token_id=None))


@needs_library
@pytest.mark.parametrize("in_function", [False, True])
def test_no_file_brings_operators_of_ours(in_function: bool, tmp_path: Path) -> None:
    """Whose inputs may be addresses, of any memory of the server."""
    model = onnx.ModelProto.FromString(norm_graph({"norm": "rms", "epsilon": 0.1}, {}))
    if in_function:
        (node,), opsets = model.graph.node, [model.opset_import.pop()]
        model.functions.append(
            helper.make_function("other", "Norm", node.input, node.output, [node], opsets)
        )
        node.domain = "other"
        model.opset_import.append(helper.make_opsetid("other", 1))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="operators of ours"):
        open_session(tmp_path / "model.onnx", threads=1, library=Library(FILE))
