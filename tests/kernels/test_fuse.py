"""Graphs with fused products against the graphs that they were made of.

The oracle computes our operators in NumPy and all others as ONNX and ONNX Runtime do. Sums of
floats differ in order, so a value that is between two steps of int8 may be rounded to the other
one, and its token then differs by as much as a step of one input makes; most tokens meet none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from kvasir.kernels.functions import FUNCTIONS
from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import LINEARS
from kvasir.kernels.library import FILE, Library
from kvasir.kernels.recurrences import MOST_KEYS
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ENCODER_GRAPH_FILE, GRAPH_FILE
from kvasir.model.onnx.runtime import onnxruntime, open_cpu_session
from kvasir.model.packing import HIDDEN_OUTPUT, VECTORS_OUTPUT, pack
from kvasir.server.engine.session import open_session
from tests.kernels.graphs import needs_library, usable_paths
from tests.kernels.test_linear import same_bits
from tests.kit.encoder_decoders import PairSession, export_both
from tests.kit.encoders import (
    BERT,
    LAST_TOKEN,
    MODERN,
    MPNET,
    expected_vectors,
    export_encoder,
    make_text,
    open_runner,
)
from tests.kit.fake_seq2seq import small_config, small_model
from tests.kit.linear_reference import FusedSession
from tests.kit.random_models import RandomModel, export_random
from tests.kit.whole_graph import GraphSession
from tests.model.variants import VARIANTS

Floats = NDArray[np.float32]
_N_PROMPT, _N_TOKENS = 12, 20
IN_4_BITS = ("gpt2", "phi", "gemma", "gpt-oss")
IN_32_BITS = ("gpt2", "phi", "gemma", "bloom", "gpt-oss", "persimmon")
NORMS = {"LayerNormalization", "RMSNormalization"}
ENCODERS = {"bert": BERT, "mpnet": MPNET, "modernbert": MODERN, "last token": LAST_TOKEN}


def nodes_of(graph: onnx.GraphProto) -> list[NodeProto]:
    """Return the nodes of a graph and its branches."""
    parts = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for part in parts for node in nodes_of(part))]


def features(model: onnx.ModelProto) -> Counter[str]:
    """Count products, and what was put into them."""
    found = Counter[str]()
    for node in nodes_of(model.graph):
        if node.op_type in LINEARS:
            given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            found[node.op_type] += 1
            found["norm"] += bool(given["norm"])
            found["activation"] += bool(given["activation"])
            found["gated"] += given["gated"]
            found["mixed"] += given.get("mixed", 0)
            found["bias"] += bool(node.input[3])
            found["residual"] += bool(node.input[6])
    return +found


def expected_features(config: TransformerConfig, n_bits: int) -> Counter[str]:
    """Count what the configuration says; with 4 bits, layers are there twice.

    A layer's last bias and residual are then added after both branches.
    """
    n_layer = config.n_layer
    n_experts = sum(map(config.has_experts, range(n_layer)))
    n_dense = n_layer - n_experts
    norms_first = config.norm_placement in ("pre", "both")
    adds_outputs = config.norm_placement in ("pre", "post")
    n_shared = n_experts * bool(config.d_shared_expert)  # with gates, whose residuals stay
    more = 2 * n_layer * (config.latents is not None)  # products, each after a norm
    products = 2 * (n_layer + n_dense + n_shared) + more
    n_known = (n_dense + n_shared) * (config.feed_forward != "xielu")
    counts = Counter(
        norm=norms_first * (n_layer + n_dense) + more,
        activation=n_known,
        gated=n_known * config.feed_forward.startswith(("swiglu", "geglu")),
        bias=(config.qkv_bias + config.output_bias) * n_layer
        + 2 * config.feed_forward_bias * n_dense,
        residual=adds_outputs * (n_layer + n_dense),
    )
    if n_bits == 4:
        counts["bias"] -= config.feed_forward_bias * n_dense + config.output_bias * n_experts
        counts["residual"] -= adds_outputs * n_layer
        counts += counts
        counts["Linear4"] = products
    counts["mixed"] = (n_dense + n_shared) * (n_bits != 32)
    last = 1 + bool(config.head_projection)  # the head is int8 in 4 bits, too
    counts["Linear32" if n_bits == 32 else "Linear"] = products + last
    counts["Linear32"] += n_experts + n_shared * config.shared_expert_gate  # never rounded
    counts["norm"] += (config.norm_placement != "post") * last
    counts["bias"] += config.head_bias + n_experts * config.feed_forward_bias
    return +counts


def check_near(found: Floats, expected: Floats, usual: float = 1e-5) -> None:
    """Rows of both: most are equal but for the order of sums, and none is a few steps away.

    usual: the error of most rows, which is larger where all see one that was rounded differently.
    """
    errors = np.abs(found - expected).max(axis=-1) / expected.std()
    assert np.median(errors) < usual
    assert errors.max() < 0.05


def logits(model: RandomModel, open_session: Any) -> Floats:
    """Return logits of two prompts, and of tokens decoded after them."""
    session = GraphSession(model.graph, model.config, open_session)
    session.clear(2, _N_TOKENS)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(2, _N_TOKENS))
    made = [session.run(ids[:, :_N_PROMPT], [_N_PROMPT] * 2)]
    made += [
        session.run(ids[:, end - 1 : end], [end] * 2, decode=True)
        for end in range(_N_PROMPT + 1, _N_TOKENS + 1)
    ]
    return np.concatenate(made, axis=1).reshape(2 * _N_TOKENS, -1)


OVER_STATES = {name for name, changes in VARIANTS.items() if "recurrence" in changes}
IN_8_BITS = [name for name in VARIANTS if name not in OVER_STATES]  # which GraphSession has not


@pytest.mark.parametrize(
    ("name", "n_bits"),
    [
        *((name, 8) for name in IN_8_BITS),
        *((name, 4) for name in IN_4_BITS),
        *(pytest.param(name, 32, marks=needs_library) for name in IN_32_BITS),
    ],
)
def test_every_decoder_computes_what_it_did(name: str, n_bits: int, tmp_path: Path) -> None:
    """And no product, norm, activation, bias or residual is left that could be fused."""
    changes = {"d_model": 64} | VARIANTS[name] if n_bits == 4 else VARIANTS[name]
    model = export_random(tmp_path, "fp32" if n_bits == 32 else f"int{n_bits}", **changes)
    opened: Any = FusedSession
    if n_bits == 32:
        opened = partial(open_session, threads=1, library=Library(FILE))
    check_near(logits(model, opened), logits(model, open_cpu_session))
    fused, report = fuse(onnx.load(model.graph, load_external_data=False))
    assert not report.left
    assert features(fused) == expected_features(model.config, n_bits)
    operators = {node.op_type for node in nodes_of(fused.graph)}
    assert not {"Abs", "QuantizeLinear", "Softmax", "Pow", *FUNCTIONS, *NORMS} & operators


def test_matrices_of_too_many_keys_stay(random_delta_model: RandomModel) -> None:
    """The operator would refuse each of their runs."""
    model = onnx.load(random_delta_model.graph, load_external_data=False)
    for value in model.graph.input:
        if value.name.endswith(".values"):
            value.type.tensor_type.shape.dim[2].dim_value = MOST_KEYS + 1
    operators = Counter(node.op_type for node in fuse(model)[0].graph.node)
    assert (operators["LinearAttention"], operators["Memory"]) == (2, 0)


@needs_library
@pytest.mark.parametrize(
    "name",
    ["lfm2", "qwen3.5", "kimi", "ling", "bamba", "without attention", "jamba", "falcon h1"],
)
def test_states_move_as_they_did(name: str, tmp_path: Path) -> None:
    """By new tokens alone, in their own memory: padded prompts, and rows that ride along."""
    model = export_random(tmp_path, "int8", **VARIANTS[name])
    stock = onnx.load(model.graph, load_external_data=False)
    fused, _ = fuse(stock)
    operators = Counter(node.op_type for node in fused.graph.node)
    replaced = {"CausalConvWithState", "GatherElements", "LogSoftmax", *FUNCTIONS}
    assert not replaced & operators.keys()
    n_recurrent = len(model.config.recurrent_layers)
    n_matrices, n_left = "values" in model.config.states, "channels" in model.config.states
    assert operators["LinearAttention"] == n_recurrent * n_left
    assert operators["Convolution"] == n_recurrent
    assert operators["Memory"] == n_recurrent * n_matrices
    runs = [(6, [6, 3]), (1, [1, 0]), (1, [0, 1]), (4, [2, 4])]
    found, expected = (
        state_runs(open_session(model.graph, 2, library=library), model.config, runs)
        for library in (Library(FILE, "auto"), None)
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def state_runs(session: Any, config: TransformerConfig, runs: list[Any]) -> list[Floats]:
    """Return states after each run of two rows; runs: a row's tokens, and how many are new."""
    sizes = {"batch": 2, "rows": 1, "n_positions": config.max_model_len}
    kept: dict[str, Any] = {}
    found: list[Floats] = []
    for n_tokens, n_new in runs:
        binding = session.io_binding()
        given = {
            "input_ids": np.arange(2 * n_tokens).reshape(2, -1) % config.vocab_size,
            "position_ids": np.tile(np.arange(n_tokens), (2, 1)),
            "seqlens_k": np.full(2, n_tokens - 1, np.int32),
            "total_sequence_length": np.array(n_tokens, np.int32),
            "logits_indices": np.zeros(1, np.int64),
            "n_new": np.array(n_new),
            "decode": np.array(False),
        }
        for value in session.get_inputs():
            shape = [sizes.get(size, size) for size in value.shape]
            dtype = np.int8 if value.type == "tensor(int8)" else np.float32
            if value.name in given:
                binding.bind_cpu_input(value.name, given[value.name])
                continue
            kept.setdefault(
                value.name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(shape, dtype))
            )
            binding.bind_ortvalue_input(value.name, kept[value.name])
        for value in session.get_outputs():
            if value.name.startswith("present_states."):
                past = value.name.replace("present", "past")
                binding.bind_ortvalue_output(value.name, kept[past])
            else:
                binding.bind_output(value.name)
        session.run_with_iobinding(binding)
        found += [kept[name].numpy().copy() for name in sorted(kept) if "states" in name]
    return found


@pytest.fixture(
    scope="module",
    params=[*((name, "int8") for name in ENCODERS), ("bert", "fp32"), ("modernbert", "fp32")],
)
def encoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> RandomModel:
    """Return an exported encoder."""
    name, precision = request.param
    return export_encoder(tmp_path_factory.mktemp("encoder"), precision, **ENCODERS[name])


def test_every_encoder_computes_what_it_did(encoder: RandomModel) -> None:
    """But that attention is not rounded here."""
    texts = [make_text(encoder, i) for i in range(3)]
    types = [text.type_ids for text in texts] if encoder.config.n_token_types else None
    inputs, _ = pack([text.prompt_ids for text in texts], types)
    fused, names = FusedSession(encoder.graph), [VECTORS_OUTPUT, HIDDEN_OUTPUT]
    for pair in zip(
        fused.run(names, inputs), open_cpu_session(encoder.graph).run(names, inputs), strict=True
    ):
        check_near(*pair, usual=1e-4)
    assert not fused.report.left
    operators = Counter(node.op_type for node in fused.model.graph.node)
    n_layer = encoder.config.n_layer
    if operators["Linear"]:  # and Linear32 of poolers
        assert (operators["Linear"], operators["TextAttention"]) == (4 * n_layer, n_layer)
    else:
        assert operators["TextAttention32"] == n_layer
    assert not operators.keys() & {"GroupQueryAttention", "Where", "ReduceL2", *NORMS}


@needs_library
def test_every_path_makes_the_same_vectors(encoder: RandomModel) -> None:
    """Near PyTorch's, of a text alone, also of one token, and in a run of several."""
    texts, first = [make_text(encoder, i) for i in range(7)], list[Floats]()
    for path in usable_paths():
        runner = open_runner(encoder, library=Library(FILE, path))
        vectors = runner.run(texts)
        for text, vector in zip(texts, vectors, strict=True):
            assert same_bits(runner.run([text])[0], vector)
            expected = expected_vectors(encoder, text)[0]
            assert np.abs(vector - expected).max() < 0.1 * np.abs(expected).max()
        first = first or vectors
        assert all(map(same_bits, vectors, first)), path


@needs_library
@pytest.mark.parametrize(("precision", "usual"), [("int8", 0.04), ("fp32", 1e-5)])
def test_an_encoder_decoder_computes_what_it_did(
    tmp_path: Path, precision: str, usual: float
) -> None:
    """And on every path the same bits."""
    config = small_config()
    assert config.encoder is not None
    config = replace(config, head_dim=16, encoder=replace(config.encoder, head_dim=16))
    export_both(config, small_model(config).state_dict(), tmp_path, precision)
    sources = [[5, 6, 7, 8, 9], [10, 11], [12]]
    texts, expected = PairSession(tmp_path, config).generate(sources, 8)
    first: list[Floats] = []
    for path in usable_paths():
        opened = partial(open_session, threads=2, library=Library(FILE, path))
        found = PairSession(tmp_path, config, opened).generate(sources, 8)
        assert found[0] == texts
        first = first or found[1]
        assert all(map(same_bits, found[1], first)), path
    check_near(np.concatenate(first), np.concatenate(expected), usual)
    for file, n_products in ((ENCODER_GRAPH_FILE, 4 * 2 + 1), (GRAPH_FILE, 6 * 2 + 1)):
        fused, report = fuse(onnx.load(tmp_path / file, load_external_data=False))
        assert (report.fused, report.left) == (n_products, {})
        assert not {node.op_type for node in fused.graph.node} & {"GroupQueryAttention", *NORMS}


@pytest.mark.parametrize("shape", [8, [], [8], [0, 0, 4, 16], [0, 1, 8, 64]])
def test_what_is_mixed_otherwise_stays(tmp_path: Path, shape: Any) -> None:
    model = onnx.load(export_random(tmp_path, "int8", n_layer=1).graph, load_external_data=False)
    assert features(fuse(model)[0])["mixed"] == 1
    for tensor in model.graph.initializer:
        if tensor.name.startswith("mixing.apart"):
            tensor.CopyFrom(numpy_helper.from_array(np.array(shape, np.int64), tensor.name))
    assert features(fuse(model)[0])["mixed"] == 0


@pytest.mark.parametrize("is_output", [True, False])
def test_values_that_others_read_keep_their_meaning(tmp_path: Path, is_output: bool) -> None:
    """Each is an output in turn, or another node reads it, and the nodes around it are fused.

    A rule that overlooked a reader would give it a value without its token's scale, or none at all.
    """
    path = export_random(tmp_path, "int8", n_layer=1).graph
    model = onnx.load(path, load_external_data=False)
    names = [name for node in model.graph.node[:-1] for name in node.output]
    names = [name for name in names if "present" not in name]

    def save(names: list[str], file: str) -> Path:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        outputs = names if is_output else [f"{name}.read" for name in names]
        for name, output in zip(names, outputs, strict=True):
            if not is_output:
                changed.graph.node.append(helper.make_node("Identity", [name], [output]))
            changed.graph.output.append(onnx.ValueInfoProto(name=output))
        onnx.save(changed, path.with_name(file))
        return path.with_name(file)

    session = open_cpu_session(save(names, "all.onnx"))
    feeds: dict[str, NDArray[Any]] = {
        value.name: np.zeros((1, 2, 8, 16), "b" if value.type == "tensor(int8)" else "f")
        for value in session.get_inputs()
        if "key_values" in value.name
    }
    feeds |= {"input_ids": np.array([[3, 1, 4, 1, 5]]), "position_ids": np.arange(5)[None]}
    feeds |= {"seqlens_k": np.array([4], "i"), "total_sequence_length": np.array(5, "i")}
    feeds |= {"logits_indices": np.array([0, 4]), "decode": np.array(False)}
    outputs = [value.name for value in session.get_outputs()]
    values = dict(zip(outputs, session.run(outputs, feeds), strict=True))
    n_left = Counter[int]()
    for name in names:
        fused = FusedSession(save([name], "one.onnx"))
        n_left[len(fused.report.left)] += 1
        wanted = ["logits", fused.model.graph.output[-1].name]
        for output, made in zip(wanted, fused.run(wanted, feeds), strict=True):
            difference = np.abs(made.astype(np.float64) - values[output])
            assert difference.max() <= 0.01 * np.abs(values[output]).max(), name
    assert n_left[0] > len(names) / 2  # most of them cost no product
    assert max(n_left) <= 2  # those around a gate


def test_a_name_that_branches_share_is_not_looked_through(tmp_path: Path) -> None:
    """ONNX lets both branches of an `If` use a name, of which a rule would see one maker."""
    model = export_random(tmp_path, "int4", d_model=64, n_layer=1)
    expected = logits(model, open_cpu_session)
    shared = onnx.load(model.graph, load_external_data=False)
    (choice,) = (node for node in shared.graph.node if node.op_type == "If")
    for branch in (attribute.g for attribute in choice.attribute):
        for node in branch.node:
            node.input[:] = map(without_branch, node.input)
            node.output[:] = map(without_branch, node.output)
        for value in branch.output:
            value.name = without_branch(value.name)
        del branch.value_info[:]
    onnx.save(shared, model.graph)
    check_near(logits(model, FusedSession), expected)
    assert FusedSession(model.graph).report.left


def without_branch(name: str) -> str:
    return re.sub(r"^(decode|prompt)[.]", "shared.", name)
