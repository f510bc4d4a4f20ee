"""Decoders by operators of our own: the promise of equal bits, drafts included, on every path."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from kvasir.export.verification.paged_session import PagedSession
from kvasir.export.verification.verify import Verifier
from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import Mismatch
from kvasir.kernels.library import FILE, Library
from kvasir.kernels.page import BLOCK_SIZE, page
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.kv.memory import map_memory
from kvasir.server.engine.packed import MemoryBlocks, bind_cpu_blocks, open_packed_runner
from kvasir.server.engine.session import open_session
from tests.engine.test_invariance import N_REQUESTS, RandomCapacity, make_request
from tests.kernels.graphs import needs_library, usable_paths
from tests.kit.engine_driver import CountingEngine, Result, assert_same, run_at_random, run_to_end
from tests.kit.random_models import RandomModel, export_random
from tests.model.variants import VARIANTS

# Of floats; with windows, norms after sublayers and soft caps; of experts; with norms of each head;
# over latents.
MODELS = ["random_model", "random_int8_model", "random_int4_model", "random_windowed_model"]
MODELS += ["random_int8_mixture_model", "qwen3", "deepseek"]
PATHS = usable_paths()
pytestmark = needs_library


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    if request.param in VARIANTS:
        changes = {**VARIANTS[request.param], "max_model_len": 200}
        return export_random(tmp_path_factory.mktemp("model"), "int8", **changes)
    exported: RandomModel = request.getfixturevalue(request.param)
    return exported


def open_runner(model: RandomModel, path: str = "auto", **options: Any) -> PagedRunner:
    options = {"max_num_seqs": 4, "threads": 2, "kv_cache_bytes": 2**26, **options}
    return open_packed_runner(model.graph, model.config, Library(FILE, path), **options)


@cache
def run_alone(model: RandomModel) -> list[Result]:
    """The results of each request alone, its prompt in one piece."""
    engine = Engine(open_runner(model, max_num_seqs=1), chunk_size=200)
    return [run_to_end(engine, [make_request(model, i)])[i] for i in range(N_REQUESTS)]


@pytest.mark.parametrize("n", range(4))
def test_same_request_same_bits(model: RandomModel, n: int) -> None:
    """In any rows and chunks, with prefixes that are shared or not, and drafts."""
    generator = np.random.default_rng(n)
    runner = open_runner(
        model, max_num_seqs=[2, 5, 8][n % 3], threads=1 + n % 2, prefix_cache_bytes=2**20 * (n % 2)
    )
    engine = Engine(runner, chunk_size=[2, 3, 64, 200][n], speculate=n > 0)
    if n == 3:
        engine.scheduler.capacity = RandomCapacity(generator)
    requests = [make_request(model, i) for i in range(N_REQUESTS)]
    assert_same(run_at_random(engine, requests, generator, n_aborted=n), run_alone(model))


@pytest.mark.parametrize("n", range(2))
def test_predictions_change_no_bit(model: RandomModel, n: int) -> None:
    """Right ones, wrong ones, and ones that miss, change and add tokens; few and many at once."""
    generator = np.random.default_rng(n)
    engine = CountingEngine(open_runner(model, max_num_seqs=[2, 6][n]), chunk_size=32)
    engine.speculate = True
    requests, alone = [make_request(model, i) for i in range(N_REQUESTS)], run_alone(model)
    for request, result in zip(requests, alone, strict=True):
        for token in result.token_ids:
            kept = [[token], [], [7], [token, 7]]
            error = [0.0, 0.2, 1.0][request.id % 3]
            request.prediction += kept[generator.choice(4, p=[1 - error, *[error / 3] * 3])]
    assert_same(run_at_random(engine, requests, generator, n_aborted=1), alone)
    assert 20 < engine.n_accepted < engine.n_drafted


@pytest.mark.parametrize("path", PATHS)
def test_same_bits_on_every_path(model: RandomModel, path: str) -> None:
    engine = Engine(open_runner(model, path), chunk_size=16)
    results = run_to_end(engine, [make_request(model, i) for i in range(N_REQUESTS)])
    assert [results[i] for i in range(N_REQUESTS)] == run_alone(model)


def test_prefixes_are_shared(model: RandomModel) -> None:
    engine = Engine(open_runner(model), chunk_size=200)
    for wanted in (range(N_REQUESTS), reversed(range(N_REQUESTS))):
        requests = [make_request(model, i) for i in wanted]
        results = run_to_end(engine, requests)
        assert [results[i] for i in range(N_REQUESTS)] == run_alone(model)
    assert sum(request.n_cached for request in requests) >= BLOCK_SIZE


def test_the_loss_is_that_of_stock_operators(random_int8_model: RandomModel) -> None:
    """Keys and values are rounded a token at a time here, and prompts' keys and values too."""
    model = random_int8_model
    session = open_session(model.graph, 2, library=Library(FILE), rewrite=page)

    def make_model(n_blocks: int) -> DeviceModel:
        return DeviceModel(session, n_blocks, bind_cpu_blocks)

    verifier = Verifier(model.config, model.decoder.state_dict())
    ours = verifier.verify(PagedSession(model.config, make_model, BLOCK_SIZE).logits)
    stock = model.verify()
    assert ours.mean_kl is not None
    assert stock.mean_kl is not None
    assert ours.mean_kl < 1.5 * stock.mean_kl


@pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only")
def test_free_blocks_give_their_pages_back() -> None:
    """Pages that they share with held blocks stay."""
    size, n_blocks = 5000, 40
    blocks = MemoryBlocks(n_blocks=n_blocks, block_size=64, max_num_seqs=9, max_model_len=640)
    memory = map_memory(n_blocks * size)
    blocks._memories.append((memory, size))
    memory[:] = b"\1" * len(memory)
    rows = [blocks.admit(64 * n, 0, []) for n in (3, 9, 2, 7, 1)]
    for admitted in rows[::2]:
        assert admitted is not None
        blocks.free(admitted[0])
    held = {int(block) for row, n in ((1, 9), (3, 7)) for block in blocks.table[row, :n]}
    blocks.release_idle_memory()
    for block in range(n_blocks):
        of_block = memory[block * size : (block + 1) * size]
        if block in held:
            assert of_block == b"\1" * size
        elif not held & {block - 1, block + 1}:
            assert of_block == bytes(size) or block in {0, n_blocks - 1}


def assert_left_alone(graph: ModelProto, problem: str) -> None:
    before = graph.SerializeToString()
    with pytest.raises(Mismatch, match=problem):
        page(graph)
    assert graph.SerializeToString() == before


@pytest.mark.parametrize(
    ("model", "problem"),
    [("random_biased_model", "a bias")],
)
def test_other_attention_is_left_alone(
    request: pytest.FixtureRequest, model: str, problem: str
) -> None:
    graph = request.getfixturevalue(model).graph
    assert_left_alone(onnx.load(graph, load_external_data=False), problem)


def test_other_heads_are_left_alone(random_int8_model: RandomModel) -> None:
    graph = onnx.load(random_int8_model.graph, load_external_data=False)
    for value in graph.graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.shape.dim[3].dim_value = 24
    assert_left_alone(graph, "24 channels")


def test_a_layer_is_five_nodes(random_int8_model: RandomModel) -> None:
    graph = onnx.load(random_int8_model.graph, load_external_data=False)
    fused, report = fuse(page(graph))
    assert not report.left
    ours = [node for node in fused.graph.node if node.domain == "kvasir"]
    assert len(ours) == 5 * random_int8_model.config.n_layer + 1
