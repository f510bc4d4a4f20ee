"""Tracing one layer of each kind gives the graph that tracing all of them gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import onnx_ir
import pytest

from kvasir.export.graphs import trace
from kvasir.export.graphs.decoder import export_graph
from kvasir.export.graphs.encoder import export_encoder_graph
from kvasir.model.directory import GRAPH_FILE
from tests.kit.encoders import BERT
from tests.kit.random_models import make_config, make_decoder
from tests.model.variants import VARIANTS


def described(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yield each node's operator and attributes, and what makes each input; then the outputs."""
    graph = onnx_ir.load(path).graph
    makers: dict[onnx_ir.Value | None, Any] = {None: None}
    makers |= {value: value.name for value in graph.inputs}
    for value in graph.initializers.values():
        assert value.const_value is not None
        makers[value] = hash(value.const_value.numpy().tobytes()), str(value.shape)
    for i, node in enumerate(graph):
        attributes = sorted((name, str(of.value)) for name, of in node.attributes.items())
        yield node.op_type, attributes, [makers[value] for value in node.inputs]
        makers |= {value: (i, place) for place, value in enumerate(node.outputs)}
    yield tuple((value.name, makers[value]) for value in graph.outputs)


# With windows and experts in some layers.
MIXED = VARIANTS["qwen3 mixture"] | {
    "dense_layers": (0, 2),
    "sliding_window": 5,
    "sliding_window_layers": (0, 2),
    "sliding_window_rope_theta": 50.0,
}
OF_TEXTS = BERT | {"sliding_window": 4, "sliding_window_layers": (1, 2)}


@pytest.mark.parametrize(("changes", "n_kinds"), [(MIXED, 2), (OF_TEXTS, 2)])
def test_layers_that_are_alike_are_traced_once(
    changes: dict[str, Any], n_kinds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(**changes, n_layer=3)
    export = export_encoder_graph if config.pooling else export_graph
    weights, graphs = make_decoder(config).state_dict(), list[Any]()
    kinds = list(map(trace._kind_of, make_decoder(config).blocks))
    assert len(set(kinds)) == n_kinds
    of_each = count()
    for kind_of in (trace._kind_of, lambda _: str(next(of_each))):
        monkeypatch.setattr(trace, "_kind_of", kind_of)
        folder = tmp_path / str(len(graphs))
        folder.mkdir()
        export(config, weights, folder / GRAPH_FILE)
        graphs.append(list(described(folder / GRAPH_FILE)))
    for once, each in zip(*graphs, strict=True):
        assert once == each
    assert len(graphs[0]) > 5 * config.n_layer
