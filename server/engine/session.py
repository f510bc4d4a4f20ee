"""ONNX Runtime sessions on the CPU, and the KV cache inputs of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir.kernels.library import Library
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import CACHE_OUTPUTS, STATE_OUTPUTS, present_name, state_names
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.server.engine.adapters.loaded import GraphAdapters

if TYPE_CHECKING:
    from onnx import ModelProto

_ELEMENT_TYPES = {  # numbers in onnx.TensorProto, and bytes
    "tensor(float)": (1, 4),
    "tensor(float16)": (10, 2),
    "tensor(bfloat16)": (16, 2),
    "tensor(int8)": (3, 1),
    "tensor(float8e4m3fn)": (17, 1),
}


def open_session(
    graph: Path,
    threads: int,
    spin_microseconds: int = 100,
    *,
    library: Library | None = None,
    rewrite: Callable[[ModelProto], ModelProto] | None = None,
    adapters: GraphAdapters | None = None,
    of_sources: bool = False,
    plans_memory: bool = True,
    fits_16_bits: bool = False,
) -> onnxruntime.InferenceSession:
    """Open a session on the CPU.

    spin_microseconds: how long an idle thread keeps its processor. library: of the operators to use
    in place of ONNX Runtime's; None is none. rewrite: what is done to the graph before they are.
    adapters: learn how the graph reads them. of_sources: see GraphAdapters.attach.

    Raises ValueError for a graph that has such operators in its file.
    """
    entries: dict[str, object] = {
        "session.intra_op.allow_spinning": int(spin_microseconds > 0),
        "session.intra_op.spin_duration_us": max(1, spin_microseconds),
        "session.force_spinning_stop": 1,  # no thread spins between two runs
    }
    source: Path | bytes = graph
    if library is not None or adapters is not None:
        import onnx  # noqa: PLC0415  slow to import

        from kvasir.kernels.fuse import fuse  # noqa: PLC0415  imports onnx
        from kvasir.kernels.graph import DOMAIN, Mismatch, parts  # noqa: PLC0415  imports onnx

        model = onnx.load(graph, load_external_data=False)
        bodies: list[Any] = [model.graph, *model.functions]
        nodes = (node for body in bodies for part in parts(body) for node in part.node)
        if any(node.domain == DOMAIN for node in nodes):  # whose inputs may be addresses
            raise ValueError(f"{graph.name} has operators of ours; export the model again")
        if library is not None:
            model, report = fuse(model if rewrite is None else rewrite(model))
            if rewrite is not None and report.left:
                raise Mismatch(next(iter(report.left.values())))
        if adapters is not None:
            adapters.attach(model, of_sources=of_sources)
        source = model.SerializeToString()
        entries["session.model_external_initializers_file_folder_path"] = graph.parent
    return open_cpu_session(
        source,
        threads,
        entries,
        library=None if library is None else library.register,
        plans_memory=plans_memory,
        fits_16_bits=fits_16_bits,
    )


@dataclass(frozen=True, slots=True)
class KVInput:
    """The keys or the values of one layer, which come in as `name` and go out as `present`.

    layer: of the model. block: 2 i for keys of the i-th layer that has such, 2 i + 1 for values.
    element_type: number in onnx.TensorProto. shape: without the first axis, which a run chooses;
    other axes may be names.
    """

    name: str
    present: str
    layer: int
    block: int
    element_type: int
    itemsize: int
    shape: tuple[int | str, ...]

    @property
    def bytes_per_item(self) -> int:
        """Bytes for each index of the first axis, if the graph fixes the others."""
        return self.itemsize * math.prod(map(int, self.shape))


def check_shape(session: onnxruntime.InferenceSession, config: TransformerConfig) -> None:
    """Raise ValueError unless graph and configuration, for which buffers are made, agree."""
    sizes = {value.name: value.shape[-1] for value in session.get_outputs()}
    layers = {kv.layer for kv in kv_inputs(session)}
    layers |= {int(name.split(".")[1]) for name in state_inputs(session)}
    n_tokens, n_layer = sizes.get("logits"), len(layers)
    if (n_tokens, n_layer) != (config.vocab_size, config.n_layer):
        raise ValueError(
            f"the graph has {n_tokens} tokens and {n_layer} layers, and config.json "
            f"{config.vocab_size} and {config.n_layer}; export the model again"
        )
    states = state_names(config)
    if {*(found := state_inputs(session))} != {*states}:
        raise ValueError(
            f"the graph has the states {found}, and config.json {states}; export the model again"
        )


def kv_inputs(session: onnxruntime.InferenceSession) -> list[KVInput]:
    """Parse the KV cache inputs of a graph, such as `past_key_values.3.key`."""
    values = [v for v in session.get_inputs() if v.name.partition(".")[0] in CACHE_OUTPUTS]
    layers = sorted({int(value.name.split(".")[1]) for value in values})
    inputs = []
    for value in values:
        _, layer, part = value.name.split(".")
        block = 2 * layers.index(int(layer)) + part.startswith("value")
        kind, shape = _ELEMENT_TYPES[value.type], tuple(value.shape[1:])
        name = value.name
        inputs.append(KVInput(name, present_name(name), int(layer), block, *kind, shape))
    return inputs


def state_inputs(session: onnxruntime.InferenceSession) -> list[str]:
    """Return the names of a graph's inputs for states, such as `past_states.3.convolution`."""
    names = (value.name for value in session.get_inputs())
    return [name for name in names if name.partition(".")[0] in STATE_OUTPUTS]
