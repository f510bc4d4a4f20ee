"""Models with adapters: right against the merged model, and equal bits in any company."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from safetensors.numpy import save_file
from torch import nn

from kvasir.export.directory import export_checkpoint
from kvasir.export.verification import plan
from kvasir.kernels.adapter_table import HADAMARD, TABLE
from kvasir.kernels.library import FILE, Library
from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, AdapterError
from kvasir.model.adapters.layout import Layer, Layout, Part
from kvasir.model.adapters.peft import TENSOR
from kvasir.model.directory import (
    ADAPTERS_FILE,
    ENCODER_GRAPH_FILE,
    ModelDirectory,
    load_model_dir,
)
from kvasir.server.engine.adapters.loaded import (
    Adapter,
    GraphAdapters,
    NoAdaptersError,
    _columns,
)
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.encoder.runner import EncoderRunner
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.packed import open_decoder
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams
from kvasir.server.engine.seq2seq.runner import Seq2SeqRunner
from kvasir.server.engine.sequence import Sequence
from tests.kernels.graphs import graph, needs_library, usable_paths
from tests.kit.adapters import save_adapter
from tests.kit.engine_driver import Result, assert_same, run_at_random, run_to_end
from tests.kit.huggingface_checkpoints import make_model
from tests.kit.huggingface_models import make_encoder, make_encoder_decoder, save
from tests.kit.short_samples import shorten_samples

pytestmark = needs_library
MOST_BYTES, N_REQUESTS, N_TEXTS = 2**24, 16, 24
# Each product that reads adapters, of our operators and of ONNX Runtime's, which fp32 has.
# tests/model/test_adapter_layout.py has what importers do. Phi-3's network is Llama's here, so that
# it is traced once.
KINDS = ["phi3 int8 own", "gpt_neox int4 own", "bart int8 own"]
KINDS += ["llama fp32 stock", "gpt2 int8 stock", "llama int4 stock", "bart fp32 stock"]
ENCODERS = ["bert int8 own", "modernbert int8 stock"]
MAKERS: dict[str, Callable[[], Any]] = {
    "bart": partial(make_encoder_decoder, "bart"),
    **{kind: partial(make_encoder, kind) for kind in ("bert", "modernbert")},
    **{kind: partial(make_model, kind) for kind in ("llama", "gpt_neox", "gpt2", "smollm3")},
    "phi3": partial(make_model, "phi3", sliding_window=None),
}
TASKS = {"bart": "SEQ_2_SEQ_LM", "bert": "FEATURE_EXTRACTION", "modernbert": "FEATURE_EXTRACTION"}
OPTIONS: list[dict[str, Any]] = [
    {"r": 4},
    {"r": 20, "use_rslora": True, "lora_alpha": 4},
    # Some layers of one block, by any name.
    {"r": 8, "target_modules": r".*\b1\..*(proj|dense|4h|_h|value|c_attn|W[io])"},
]
AdaptedRunner = PagedRunner | OnnxRunner | Seq2SeqRunner
Opening = dict[str, Any]  # further arguments


@dataclass(frozen=True)
class Served:
    """An exported model in a folder, with adapters beside it."""

    kind: str
    precision: str
    operators: str  # own or stock
    folder: Path

    @classmethod
    def make(cls, name: str, folder: Path) -> Served:
        """Export a model, and save an adapter for each of OPTIONS."""
        kind, precision, operators = name.split()
        served = cls(kind, precision, operators, folder)
        served.export()
        for i in range(len(OPTIONS)):
            served.adapt(f"adapter{i}", i)
        return served

    def export(self) -> None:
        """Export the model that adapters are of."""
        source = save(self.folder / "source", self.model())
        export_checkpoint(source, self.folder / "base", precision=self.precision)

    def adapt(self, name: str, i: int, **options: Any) -> Any:
        """Save an adapter of OPTIONS; return peft's model with it."""
        values = {"task_type": TASKS.get(self.kind, "CAUSAL_LM")} | OPTIONS[i] | options
        if self.kind == "bert":
            values["exclude_modules"] = r".*pooler.*"
        return save_adapter(self.folder / name, self.model(), seed=i, **values)

    def model(self) -> nn.Module:
        model: nn.Module = MAKERS[self.kind]()
        return model

    @property
    def has_sources(self) -> bool:
        return self.kind == "bart"

    @property
    def paths(self) -> list[str]:
        return usable_paths() if self.operators == "own" else ["auto"]

    def opening(self, path: str, *, adapts: bool) -> tuple[ModelDirectory, Opening]:
        model = load_model_dir(self.folder / "base")
        layout = Layout.load(model.path / ADAPTERS_FILE) if adapts else None
        library = Library(FILE, path) if self.operators == "own" else None
        return model, {"layout": layout, "library": library}

    def runner(self, *, adapts: bool = True, path: str = "auto", **options: Any) -> AdaptedRunner:
        options = {"max_num_seqs": 4, "threads": 2, "kv_cache_bytes": 2**26, **options}
        model, opening = self.opening(path, adapts=adapts)
        if self.has_sources:
            options.pop("prefix_cache_bytes", 0)
            encoder = model.path / ENCODER_GRAPH_FILE
            return Seq2SeqRunner(encoder, model.graph_path, model.config, **options, **opening)
        runner = open_decoder(model.graph_path, model.config, **options, **opening)
        assert isinstance(runner, PagedRunner if self.operators == "own" else OnnxRunner)
        return runner

    def encoder(
        self, *, adapts: bool = True, path: str = "auto", threads: int = 1
    ) -> EncoderRunner:
        model, opening = self.opening(path, adapts=adapts)
        return EncoderRunner(model.graph_path, model.config, threads=threads, **opening)

    def load(self, runner: AdaptedRunner | EncoderRunner, i: int) -> Adapter:
        assert runner.adapters is not None
        return runner.adapters.load(self.folder / f"adapter{i}", f"adapter{i}", MOST_BYTES)

    def load_all(
        self, runner: AdaptedRunner | EncoderRunner, order: Iterable[int] = range(len(OPTIONS))
    ) -> list[Adapter]:
        """Load the adapters of OPTIONS in any order, and return them in theirs."""
        loaded = {i: self.load(runner, i) for i in order}
        return [loaded[i] for i in range(len(OPTIONS))]

    @cached_property
    def alone(self) -> list[Result]:
        """The results of each request alone."""
        runners = {n: self.runner(max_num_seqs=n) for n in ((1, 3) if self.has_sources else (1,))}
        loaded = {n: self.load_all(runner) for n, runner in runners.items()}
        results = []
        for i in range(N_REQUESTS):
            n_rows = self.request(i, [None] * 3).params.n_rows
            engine = Engine(runners[n_rows], chunk_size=200)
            results.append(run_to_end(engine, [self.request(i, loaded[n_rows])])[i])
        return results

    @cached_property
    def vectors_alone(self) -> list[NDArray[np.float32]]:
        """The vectors of each text alone."""
        runner = self.encoder()
        adapters = self.load_all(runner)
        return [runner.run([make_text(i, adapters)])[0] for i in range(N_TEXTS)]

    def request(self, i: int, adapters: list[Adapter] | list[None]) -> Sequence:
        """Return request i, of which every fourth has no adapter. Many begin alike."""
        generator = np.random.default_rng(i)
        length = [1, 2, 70, *generator.integers(1, 80, size=3).tolist()][i % 6]
        length = min(length, 60) if self.has_sources else length
        prompt_ids = np.random.default_rng(i % 2).integers(320, size=length).tolist()
        beams = BeamParams(3, 1.0) if self.has_sources and i % 7 == 4 else None
        params = SamplingParams(
            max_tokens=int(generator.integers(1, 14)),
            temperature=[0.0, 0.9][i % 2] if beams is None else 0.0,
            seed=i,
            logprobs=2,
            prompt_logprobs=2 if i % 5 == 0 and not self.has_sources else None,
            beams=beams,
        )
        adapter = None if i % 4 == 3 else adapters[i % 4]
        prefix = [3, 9][: 1 + i % 2] if self.has_sources else []
        ending = frozenset({5}) if self.has_sources else frozenset[int]()
        more: Opening = {"target_prefix": prefix, "adapter": adapter}
        return Sequence(i, prompt_ids, params, ending, 0.0, **more)


@pytest.fixture(scope="module", autouse=True)
def few_pairs() -> Iterator[None]:
    """Measure exported models, of which other tests are, on as little text as is ever done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_BUDGET", 0.0)
        yield from shorten_samples()


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.make(request.param, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.make(request.param, tmp_path_factory.mktemp("encoders"))


def make_text(i: int, adapters: list[Adapter], *, wants_tokens: bool = True) -> EncoderSequence:
    """Text i, of which every fourth has no adapter."""
    generator = np.random.default_rng(i)
    ids = generator.integers(4, 300, size=[1, 2, *generator.integers(1, 60, 4)][i % 6]).tolist()
    adapter = None if i % 4 == 3 or not adapters else adapters[i % 4]
    params = SamplingParams(max_tokens=0)
    more: Opening = {"wants_tokens": wants_tokens, "adapter": adapter}
    return EncoderSequence(i, ids, params, frozenset(), 0.0, **more)


def test_mixed_columns_are_the_same_bits_on_every_cpu() -> None:
    """Sums of halves, of halves of these, and so on: libraries add in an order of the CPU's."""
    a = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    columns = _columns(a, is_mixed=True)

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


def test_factors_of_other_sizes_are_refused() -> None:
    """An operator would read what is behind an adapter's matrix."""
    ones = np.ones(64, dtype=np.float32)
    constants = {"weight": np.zeros((64, 20), dtype=np.int8), "scales": ones[:20]}
    part = Part("q", 20, 0, np.arange(20, dtype=np.int32))
    for n_in, n_out in ((48, 20), (64, 16)):
        layers = {"weight": Layer((part,), ones[:n_out], ones[:n_in])}
        model = ModelProto.FromString(graph("Linear", constants))
        with pytest.raises(NoAdaptersError, match=r"weight has \(64, 20\) inputs"):
            GraphAdapters(Layout(("",), layers)).attach(model)


def test_a_table_in_the_graph_is_refused() -> None:
    """A value of a branch is read in the place of an input of that name."""
    model = ModelProto()
    model.graph.node.add().attribute.add().g.initializer.add().name = TABLE
    with pytest.raises(NoAdaptersError, match=TABLE):
        GraphAdapters(Layout(("",), {})).attach(model)


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
    return GraphAdapters(Layout(("",), layers))


def test_an_adapter_takes_little_more_memory_while_it_is_read(tmp_path: Path) -> None:
    graph = save_constant(tmp_path, 512, 64, np.float16(1))
    tracemalloc.start()
    adapter = graph.load(tmp_path, "a", 2**30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The file, its numbers in float32, and the matrices that they become.
    assert peak < 4 * adapter.n_bytes


def test_numbers_that_16_bits_do_not_hold_are_refused(tmp_path: Path) -> None:
    save_constant(tmp_path, 16, 4, np.float32(3.38e38)).load(tmp_path, "a", 2**30)
    graph = save_constant(tmp_path, 16, 4, np.float32(3.4e38))
    with pytest.raises(AdapterError, match="a is too large"):  # it would round to infinity
        graph.load(tmp_path, "a", 2**30)


def test_a_rank_that_operators_do_not_take_is_refused(tmp_path: Path) -> None:
    graph = save_constant(tmp_path, 16, 33, np.float32(1))
    with pytest.raises(AdapterError, match=r"'mine': r of a is 33; expected at most 32$"):
        graph.load(tmp_path, "mine", MOST_BYTES)


@pytest.mark.parametrize("n", range(3))
def test_same_request_same_bits(served: Served, n: int) -> None:
    """In any mix and chunks, on any path, from the prefix cache or not, with drafts.

    Of an encoder-decoder, ONNX Runtime computes some, which depends on the CPU alone.
    """
    generator = np.random.default_rng(n)
    has_cache = n == 1 and not served.has_sources
    path = "auto" if served.has_sources else served.paths[n % len(served.paths)]
    sizes: Opening = {"max_num_seqs": [3, 5, 16][n], "prefix_cache_bytes": 2**20 * has_cache}
    runner = served.runner(threads=1 + n % 2, path=path, **sizes)
    adapters = served.load_all(runner, generator.permutation(len(OPTIONS)).tolist())
    speculate = n > 0 and runner.drafts_exactly
    engine = Engine(runner, chunk_size=[2, 3, 64][n], speculate=speculate)
    for _ in range(1 + has_cache):  # the second time prompts are cached
        requests = [served.request(i, adapters) for i in range(N_REQUESTS)]
        assert_same(run_at_random(engine, requests, generator, n_aborted=n), served.alone)
    assert bool(sum(request.n_cached for request in requests)) == has_cache


def test_without_an_adapter_bits_are_those_of_a_server_without_adapters(served: Served) -> None:
    engine = Engine(served.runner(adapts=False), chunk_size=32)
    requests = [served.request(i, []) for i in range(3, N_REQUESTS, 4)]
    results = run_to_end(engine, requests)
    assert [results[request.id] for request in requests] == served.alone[3::4]


def test_a_text_has_the_same_bits(encoder: Served) -> None:
    """Beside any others, in one run or several at a time; without an adapter, as without any."""
    alone = encoder.vectors_alone
    for n, budget in enumerate((1, 40, 2000)):
        runner = encoder.encoder(path=encoder.paths[n % len(encoder.paths)], threads=1 + n % 2)
        engine = EncoderEngine(runner, token_budget=budget, max_num_seqs=8)
        adapters = encoder.load_all(runner)
        for i in np.random.default_rng(n).permutation(N_TEXTS):
            engine.add(make_text(int(i), adapters))
        found = dict[int, bytes]()
        while engine.has_work:
            outputs = engine.step()[0]
            found |= {one.sequence_id: np.asarray(one.vectors).tobytes() for one in outputs}
        assert found == {i: vectors.tobytes() for i, vectors in enumerate(alone)}
        runner.release_idle_memory()
    without = encoder.encoder(adapts=False)
    for i in range(3, N_TEXTS, 4):
        assert without.run([make_text(i, [])])[0].tobytes() == alone[i].tobytes()


def vector_errors(runner: EncoderRunner, adapter: Adapter | None, right: nn.Module) -> float:
    """Return the mean error of tokens' vectors, of those that PyTorch computes."""
    errors = list[np.floating[Any]]()
    for n in range(12):
        text = replace(make_text(n, []), adapter=adapter)
        with torch.no_grad():
            expected = right(torch.tensor([text.prompt_ids])).last_hidden_state[0].numpy()
        errors.append(np.abs(runner.run([text])[0] - expected).mean())
    return float(np.mean(errors))


def prompt_errors(runner: AdaptedRunner, adapter: Adapter | None, right: nn.Module) -> float:
    """Return the mean error of prompts' log-probabilities, of those that PyTorch computes.

    Of an encoder-decoder: those of the first token of each source's target.
    """
    if isinstance(runner, Seq2SeqRunner):
        return target_errors(runner, adapter, right)
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


def target_errors(runner: AdaptedRunner, adapter: Adapter | None, right: nn.Module) -> float:
    sources = np.random.default_rng(5).integers(4, 320, size=(60, 40))
    params, prefix = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20), [3, 17, 40]
    requests = [
        Sequence(i, ids.tolist(), params, frozenset(), 0.0, target_prefix=prefix, adapter=adapter)
        for i, ids in enumerate(sources)
    ]
    results = run_to_end(Engine(runner, chunk_size=500), requests)
    targets = torch.tensor([prefix] * len(sources))
    with torch.no_grad():
        logits = right(torch.from_numpy(sources), decoder_input_ids=targets).logits[:, -1]
    errors = list[float]()
    for i, scores in enumerate(logits.log_softmax(-1)):
        (logprobs,) = results[i].logprobs
        assert logprobs is not None
        errors += [abs(one - float(scores[n])) for n, one in logprobs.top]
    return float(np.mean(errors))


def assert_as_merged(
    served: Served, runner: Any, errors: Callable[[Any, Adapter | None, nn.Module], float]
) -> None:
    """Compare with PyTorch's merged model: errors are those of the model without an adapter.

    But for noise. By the model alone they are far larger, so the adapter is no small change.
    """
    merged = served.adapt("again", 1).merge_and_unload()
    of_rounding = errors(runner, None, served.model())
    assert errors(runner, served.load(runner, 1), merged) < 1.25 * of_rounding + 1e-6
    # int4 loses much of so small a model.
    larger = {"fp32": 100, "int8": 5, "int4": 1.5}[served.precision]
    assert errors(runner, None, merged) > larger * of_rounding


def test_answers_are_the_merged_models(served: Served) -> None:
    assert_as_merged(served, served.runner(), prompt_errors)


def test_vectors_are_the_merged_models(encoder: Served) -> None:
    assert_as_merged(encoder, encoder.encoder(), vector_errors)


def test_memory_lives_until_the_last_sequence_has_ended(served: Served) -> None:
    """Nobody frees it, whatever forgets the adapter meanwhile."""
    runner = served.runner()
    engine = Engine(runner, chunk_size=64)
    gc.disable()  # so that what is made here is young, and looking at the rest is saved
    try:
        adapter = served.load(runner, 0)
        forgotten = weakref.ref(adapter)
        request = served.request(0, [adapter] * 3)
        engine.add(request)
        del adapter, request
        gc.collect(1)
        assert forgotten() is not None
        while engine.has_work:
            engine.step()
        gc.collect(1)
        assert forgotten() is None
    finally:
        gc.enable()
