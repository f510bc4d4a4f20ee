"""What of the path to a GPU can be run without one: the binding, on the CPU, and what is said where there is none."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from export.paged_graph import export_paged_graph
from server.engine.cuda import session as session_module
from server.engine.cuda.runtime import NoDeviceError, free_memory
from server.engine.cuda.session import DeviceModel, block_bytes, open_cuda_session
from server.engine.session import open_session
from tests.random_models import make_config, make_decoder


class HostBuffer:
    def __init__(self, n_bytes: int) -> None:
        self.array = np.zeros(n_bytes, dtype=np.uint8)
        self.address = self.array.ctypes.data


NO_GPU = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="says what is said where there is none",
)


def write_graph(path: Path, dtype: ir.DataType) -> None:
    """A graph over blocks [n, 2, 1, 3]: logits are the ids, and present is past with the first id everywhere."""
    ids = ir.Value(
        name="input_ids", shape=ir.Shape(["tokens"]), type=ir.TensorType(ir.DataType.INT64)
    )
    past, present, nodes = [], [], []
    first = ir.tensor(np.array(0), name="first")
    index = ir.Value(name="first", type=ir.TensorType(ir.DataType.INT64), const_value=first)
    for part in ("key", "value"):
        blocks = ir.Value(
            name=f"past_key_values.0.{part}",
            shape=ir.Shape(["n", 2, 1, 3]),
            type=ir.TensorType(dtype),
        )
        taken = ir.node("Gather", [ids, index], attributes={"axis": 0})
        cast = ir.node("Cast", [taken.outputs[0]], attributes={"to": dtype.value})
        shape = ir.node("Shape", [blocks])
        expanded = ir.node("Expand", [cast.outputs[0], shape.outputs[0]])
        out = expanded.outputs[0]
        out.name, out.shape, out.type = f"present.0.{part}", blocks.shape, blocks.type
        past.append(blocks)
        present.append(out)
        nodes += [taken, cast, shape, expanded]
    floats = ir.node("Cast", [ids], attributes={"to": ir.DataType.FLOAT.value})
    logits = floats.outputs[0]
    logits.name, logits.shape, logits.type = (
        "logits",
        ir.Shape(["tokens"]),
        ir.TensorType(ir.DataType.FLOAT),
    )
    graph = ir.Graph(
        [ids, *past],
        [logits, *present],
        nodes=[*nodes, floats],
        initializers=[index],
        opset_imports={"": 23},
        name="blocks",
    )
    ir.save(ir.Model(graph, ir_version=10), path)


@pytest.mark.parametrize(("dtype", "itemsize"), [(ir.DataType.FLOAT, 4), (ir.DataType.FLOAT16, 2)])
def test_ids_go_in_logits_come_out_and_blocks_stay(
    dtype: ir.DataType, itemsize: int, tmp_path: Path
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
    """With the ONNX Runtime for the CPU; with the one for GPUs where no driver is, and where the driver is no use.

    The graph is a real one, for which the CPU has no kernels.
    """
    graph = tmp_path / "model.onnx"
    export_paged_graph(make_decoder(make_config(n_layer=1)), graph, "bf16")
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
    write_graph(graph, ir.DataType.FLOAT)  # this one the CPU could run
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
    """What `readelf -d libonnxruntime_providers_cuda.so` needs of CUDA: cublas (and cublasLt), curand, cudart.

    The wheel's own extra lacks cuBLAS, and both ONNX Runtimes in one environment would overwrite each other.
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
