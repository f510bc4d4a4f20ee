"""Decoders with adapters: right against the merged model, and equal bits in any company."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import nn

from kvasir.export.directory import export_checkpoint
from kvasir.kernels.adapter_table import HADAMARD, Place
from kvasir.kernels.library import FILE, Library
from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, AdapterError
from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.adapters.peft import TENSOR, Factors
from kvasir.model.directory import ADAPTERS_FILE, load_model_dir
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters, _columns
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.model_runner import warm_up
from kvasir.server.engine.packed import open_packed_runner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence
from tests.kernels.graphs import needs_library, usable_paths
from tests.kit.adapters import save_adapter
from tests.kit.engine_driver import Result, assert_same, run_at_random, run_to_end
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint, save_tokenizer

pytestmark = needs_library
MOST_BYTES, N_REQUESTS = 2**24, 24
# With parts of our layers, one fused module, and rows that importers permute.
KINDS = [("llama", "int8"), ("llama", "int4"), ("phi3", "int8"), ("gpt_neox", "int8")]
OPTIONS: list[dict[str, Any]] = [
    {"r": 4},
    {"r": 20, "use_rslora": True, "lora_alpha": 4},
    {"r": 8, "target_modules": r".*layers\.1\..*(proj|dense|4h|_h|value)"},
]


@dataclass(frozen=True)
class Served:
    """An exported model in a folder, with adapters beside it."""

    kind: str
    precision: str
    folder: Path

    def export(self, model: nn.Module, name: str) -> Path:
        """Export a model as this one."""
        source = save_checkpoint(self.folder / f"{name}.source", model)
        save_tokenizer(source)
        out = self.folder / name
        export_checkpoint(source, out, precision=self.precision)
        return out

    def runner(self, name: str = "base", *, adapts: bool = True, **options: Any) -> PagedRunner:
        model = load_model_dir(self.folder / name)
        options = {"max_num_seqs": 4, "threads": 2, "kv_cache_bytes": 2**26, **options}
        path = options.pop("path", "auto")
        layout = Layout.load(model.path / ADAPTERS_FILE) if adapts else None
        library = Library(FILE, path)
        return open_packed_runner(model.graph_path, model.config, library, layout=layout, **options)

    def load(self, runner: PagedRunner, i: int) -> Adapter:
        assert runner.adapters is not None
        return runner.adapters.load(self.folder / f"adapter{i}", f"adapter{i}", MOST_BYTES)

    @cached_property
    def alone(self) -> list[Result]:
        """The results of each request alone, by an adapter that is loaded for it."""
        results = []
        for i in range(N_REQUESTS):
            runner = self.runner(max_num_seqs=1)
            adapters = [self.load(runner, n) for n in range(len(OPTIONS))]
            engine = Engine(runner, chunk_size=200)
            results.append(run_to_end(engine, [make_request(i, adapters)])[i])
        return results


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kind, precision = request.param
    served = Served(kind, precision, tmp_path_factory.mktemp("adapters"))
    served.export(make_model(kind), "base")
    for i, options in enumerate(OPTIONS):
        save_adapter(served.folder / f"adapter{i}", make_model(kind), seed=i, **options)
    return served


def make_request(i: int, adapters: list[Adapter]) -> Sequence:
    """Request i, of which every fourth has no adapter. Many begin alike."""
    generator = np.random.default_rng(i)
    length = [1, 2, 70, *generator.integers(1, 80, size=3).tolist()][i % 6]
    prompt_ids = np.random.default_rng(i % 2).integers(320, size=length).tolist()
    params = SamplingParams(
        max_tokens=int(generator.integers(1, 14)),
        temperature=[0.0, 0.9][i % 2],
        seed=i,
        logprobs=2,
        prompt_logprobs=2 if i % 5 == 0 else None,
    )
    adapter = None if i % 4 == 3 else adapters[i % 4]
    return Sequence(i, prompt_ids, params, frozenset(), 0.0, adapter=adapter)


def test_mixed_columns_are_the_same_bits_on_every_cpu() -> None:
    """Sums of halves, of halves of these, and so on: libraries add in an order of the CPU's."""
    rng, ones = np.random.default_rng(0), np.ones(64, dtype=np.float32)
    a = rng.standard_normal((3, 64)).astype(np.float32)
    columns = _columns(Factors(a, a, 1.0), ones, is_mixed=True)

    def mixed(parts: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        if len(parts) == 1:
            return parts
        pairs = list(zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True))
        return [*mixed([x + y for x, y in pairs]), *mixed([x - y for x, y in pairs])]

    parts = np.split(a, len(HADAMARD), axis=1)
    expected = np.concatenate(mixed(parts), axis=1) / np.float32(len(HADAMARD))
    assert columns[:, :3].T.tobytes() == expected.tobytes()
    close = (HADAMARD @ a.reshape(3, len(HADAMARD), -1)).reshape(a.shape) / len(HADAMARD)
    np.testing.assert_allclose(expected, close, rtol=1e-5, atol=1e-6)


def save_constant(folder: Path, n: int, rank: int, number: np.floating[Any]) -> GraphAdapters:
    """Save an adapter of ten layers [n, n] with one number; return the graph that takes it."""
    ones, rows, names = np.ones(n, dtype=np.float32), np.arange(n, dtype=np.int32), "abcdefghij"
    shapes = {"A": (rank, n), "B": (n, rank)}
    tensors = {
        TENSOR.format(name, part): np.full(shape, number)
        for name in names
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS_FILE)
    (folder / ADAPTER_FILE).write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    layers = {name: Layer((Part(name, n, 0, rows),), ones, ones) for name in names}
    places = {name: Place(i, is_mixed=False) for i, name in enumerate(names)}
    return GraphAdapters(Layout(("",), layers), places)


def test_an_adapter_takes_little_more_memory_while_it_is_read(tmp_path: Path) -> None:
    graph = save_constant(tmp_path, 512, 64, np.float16(1))
    tracemalloc.start()
    adapter = graph.load(tmp_path, "a", 2**30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3.5 * adapter.n_bytes


def test_numbers_that_16_bits_do_not_hold_are_refused(tmp_path: Path) -> None:
    save_constant(tmp_path, 16, 4, np.float32(3.38e38)).load(tmp_path, "a", 2**30)
    graph = save_constant(tmp_path, 16, 4, np.float32(3.4e38))
    with pytest.raises(AdapterError, match="a is too large"):  # it would round to infinity
        graph.load(tmp_path, "a", 2**30)


@pytest.mark.parametrize("n", range(4))
def test_same_request_same_bits(served: Served, n: int) -> None:
    """In any mix and chunks, from the prefix cache or not, with drafts, after loading again."""
    generator = np.random.default_rng(n)
    runner = served.runner(
        max_num_seqs=[2, 5, 8, 16][n], threads=1 + n % 2, prefix_cache_bytes=2**20 * (n % 2)
    )
    order = generator.permutation(len(OPTIONS))
    loaded = {i: served.load(runner, i) for i in order}
    adapters = [loaded[i] for i in range(len(OPTIONS))]
    engine = Engine(runner, chunk_size=[2, 3, 64, 200][n], speculate=n > 0)
    for _ in range(2):  # the second time prompts are cached
        requests = [make_request(i, adapters) for i in range(N_REQUESTS)]
        assert_same(run_at_random(engine, requests, generator, n_aborted=n), served.alone)
    assert bool(sum(request.n_cached for request in requests)) == bool(n % 2)


def test_without_an_adapter_bits_are_those_of_a_server_without_adapters(served: Served) -> None:
    engine = Engine(served.runner(adapts=False), chunk_size=32)
    requests = [make_request(i, []) for i in range(3, N_REQUESTS, 4)]
    results = run_to_end(engine, requests)
    assert [results[request.id] for request in requests] == served.alone[3::4]


@pytest.mark.parametrize("path", usable_paths())
def test_same_bits_on_every_path(served: Served, path: str) -> None:
    runner = served.runner(path=path)
    adapters = [served.load(runner, i) for i in range(len(OPTIONS))]
    requests = [make_request(i, adapters) for i in range(N_REQUESTS)]
    results = run_to_end(Engine(runner, chunk_size=16), requests)
    assert [results[i] for i in range(N_REQUESTS)] == served.alone


def test_a_rank_that_operators_do_not_take_is_refused(served: Served) -> None:
    save_adapter(served.folder / "adapter9", make_model(served.kind), r=500)
    with pytest.raises(AdapterError, match=r"'adapter9': r of .* is 500; expected at most \d+$"):
        served.load(served.runner(), 9)


def prompt_errors(runner: PagedRunner, adapter: Adapter | None, right: nn.Module) -> float:
    """Return the mean error of prompts' log-probabilities, of those that PyTorch computes."""
    rows = np.random.default_rng(5).integers(320, size=(12, 90))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    requests = [
        Sequence(i, row.tolist(), params, frozenset(), 0.0, adapter=adapter)
        for i, row in enumerate(rows)
    ]
    results = run_to_end(Engine(runner, chunk_size=128), requests)
    with torch.no_grad():
        logits = right(torch.from_numpy(rows)).logits.log_softmax(-1)
    expected = logits[:, :-1].gather(-1, torch.from_numpy(rows)[:, 1:, None])[..., 0].numpy()
    found = [[one.logprob for one in results[i].prompt_logprobs or ()] for i in range(len(rows))]
    return float(np.abs(np.array(found) - expected).mean())


def test_errors_are_no_larger_than_those_of_the_merged_model_exported(served: Served) -> None:
    """But for noise. Without an adapter they are far larger, so it is no small change."""
    i, folder = 1, served.folder / "again"
    adapted = save_adapter(folder, make_model(served.kind), seed=i, **OPTIONS[i])
    merged = adapted.merge_and_unload()
    served.export(merged, "merged")
    of_merged = prompt_errors(served.runner("merged"), None, merged)
    runner = served.runner()
    found = prompt_errors(runner, served.load(runner, i), merged)
    assert found < 1.1 * of_merged
    larger = {"int8": 5, "int4": 1.5}[served.precision]  # int4 loses much of so small a model
    assert prompt_errors(runner, None, merged) > larger * of_merged


def test_memory_lives_until_the_last_sequence_has_ended(served: Served) -> None:
    """Nobody frees it, whatever forgets the adapter meanwhile."""
    runner = served.runner()
    warm_up(runner)
    engine = Engine(runner, chunk_size=64)
    adapter = served.load(runner, 0)
    forgotten = weakref.ref(adapter)
    request = make_request(0, [adapter] * 3)
    engine.add(request)
    del adapter, request
    gc.collect()
    assert forgotten() is not None
    while engine.has_work:
        engine.step()
    gc.collect()
    assert forgotten() is None
