"""Graphs in int4, of which some matrices may be int8, with fused products and without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from kvasir.export.graphs.decoder import export_graph
from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import LINEARS
from kvasir.kernels.library import FILE, Library
from kvasir.model.directory import GRAPH_FILE
from kvasir.model.onnx.runtime import open_cpu_session
from kvasir.server.engine.session import open_session
from tests.kernels.graphs import needs_library
from tests.kernels.test_fuse import check_near, logits, nodes_of
from tests.kernels.test_linear import same_bits
from tests.kit.linear_reference import FusedSession
from tests.kit.random_models import (
    RandomModel,
    export_random,
    make_config,
    make_decoder,
    measure_scales,
)
from tests.model.variants import VARIANTS

_OF_PRODUCTS = tuple(f".{part}.weight" for part in ("qkv", "output", "up", "down"))


@pytest.mark.parametrize("int8_prompts", [True, False])
def test_int4_with_matrices_in_int8_computes_what_it_did(
    int8_prompts: bool, tmp_path: Path
) -> None:
    """Of a gate and the product after it, one or the other: the gate's scale is applied once."""
    decoder = make_decoder(make_config(d_model=64))
    parts = "0.attention.qkv", "0.feed_forward.up", "1.attention.output", "1.feed_forward.down"
    kept = {f"blocks.{part}.weight" for part in parts}
    weights, path = decoder.state_dict(), tmp_path / GRAPH_FILE
    export_graph(
        decoder.config,
        weights,
        path,
        "int4",
        measure_scales(decoder),
        int8_prompts=int8_prompts,
        kept=kept,
    )
    model, session = RandomModel(decoder, path), FusedSession(path)
    check_near(logits(model, FusedSession), logits(model, open_cpu_session))
    assert not session.report.left
    found = [n for n in nodes_of(session.model.graph) if n.op_type in LINEARS]
    in_4_bits = {n.input[1] for n in found if n.op_type == "Linear4"}
    in_8_bits = {n.input[1] for n in found if n.op_type == "Linear"} - {"embedding.weight.int8"}
    names = {f"{name}.T" for name in weights if name.endswith(_OF_PRODUCTS)}
    kept = {f"{name}.T" for name in kept}
    assert in_4_bits == {f"{name}.int4" for name in names - kept}
    assert in_8_bits == {f"{name}.int8" for name in (names if int8_prompts else kept)}
    figures = model.verify()
    assert 0.01 < figures.max_logit_error < 1.5
    assert figures.greedy_agreement > 0.6


@needs_library
def test_scales_of_floats_which_graphs_had_before_give_the_same_bits(tmp_path: Path) -> None:
    """By our operators, and by ONNX Runtime's, which folds the cast."""
    model = export_random(tmp_path, "int4", **{"d_model": 64} | VARIANTS["gpt2"])
    older = onnx.load(model.graph)
    tensors = [t for t in older.graph.initializer if t.data_type == TensorProto.FLOAT16]
    assert [t.name.endswith(".int4.scales") for t in tensors] == [True] * 4 * model.config.n_layer
    for tensor in tensors:
        wide = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    names = {tensor.name for tensor in tensors}
    casts = {n.output[0]: n.input[0] for n in nodes_of(older.graph) if {*n.input} & names}
    for node in nodes_of(older.graph):
        node.input[:] = [casts.get(name, name) for name in node.input]
    (tmp_path / "older").mkdir()
    path = tmp_path / "older" / GRAPH_FILE
    onnx.save(older, path, save_as_external_data=True, location=f"{GRAPH_FILE}.data")
    for library in (Library(FILE, "auto"), None):
        opened = partial(open_session, threads=1, library=library)
        newer, before = (logits(RandomModel(model.decoder, p), opened) for p in (model.graph, path))
        assert same_bits(newer, before)
    assert not fuse(onnx.load(path, load_external_data=False))[1].left
