"""Decodes as CUDA graphs, over a session that fails where a card would be silently wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from kvasir.model.directory import CANDIDATES_OUTPUT
from kvasir.model.reference import generate
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu import session
from kvasir.server.engine.gpu.cuda import bind_cuda_blocks
from kvasir.server.engine.gpu.cuda_runtime import NoDeviceError
from kvasir.server.engine.gpu.graphs import row_bucket, width_bucket
from kvasir.server.engine.gpu.model import DeviceModel
from kvasir.server.engine.gpu.outputs import DeviceOutputs
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import BACKENDS, open_gpu_runner
from kvasir.server.engine.kv.blocks import KVBlocks
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import FinishReason
from tests.kit.engine_driver import Result, make_sequence, run_at_random, run_to_end
from tests.kit.numpy_session import BLOCK, HostBuffer
from tests.kit.random_models import RandomModel
from tests.kit.recording_session import RecordingSession, RecordingStream, recording_backend

N_BLOCKS = 50
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "KV_BLOCK_SIZE", BLOCK)


class Recorded(NamedTuple):
    """A runner over a recording session; captures: decodes are CUDA graphs."""

    runner: PagedRunner
    session: RecordingSession
    stream: RecordingStream

    @classmethod
    def open(
        cls,
        paged_model: RandomModel,
        *,
        captures: bool = True,
        max_num_seqs: int = 5,
        rounds_kv: bool = False,
    ) -> Recorded:
        config, stream = paged_model.config, RecordingStream()
        session = RecordingSession(paged_model.graph, stream)
        card: Any = stream
        longest = config.max_model_len
        blocks = KVBlocks(
            n_blocks=N_BLOCKS, block_size=BLOCK, max_num_seqs=max_num_seqs, max_model_len=longest
        )
        bind = partial(bind_cuda_blocks, buffer=HostBuffer)
        outputs = DeviceOutputs(cast("Any", session), card, 64)
        model = DeviceModel(cast("Any", session), N_BLOCKS, bind, outputs)
        if captures:
            model.capture(card, blocks)
        runner = PagedRunner(
            model, blocks, max_model_len=longest, vocab_size=config.vocab_size, rounds_kv=rounds_kv
        )
        return cls(runner, session, stream)

    def engine(self, **options: Any) -> Engine:
        return Engine(self.runner, **{"chunk_size": 16, **options})


def run_traffic(engine: Engine, seed: int) -> dict[int, Result]:
    """Let sequences arrive, share beginnings, end and be aborted at random."""
    generator = np.random.default_rng(seed)
    common = generator.integers(300, size=40).tolist()
    sequences = []
    for i in range(14):
        own = generator.integers(300, size=int(generator.integers(1, 20))).tolist()
        prompt = common[: BLOCK * int(generator.choice([0, 0, 3, 5]))] + own
        params = SamplingParams(
            max_tokens=int(generator.integers(1, min(50, 96 - len(prompt)))),
            temperature=float(generator.choice([0.0, 0.9])),
            seed=i,
        )
        sequences.append(make_sequence(i, prompt, params))
    return run_at_random(engine, sequences, generator, n_aborted=3, longest_wait=20)


@pytest.mark.parametrize("options", [{"speculate": True}, {"rounds_kv": True}, {"max_num_seqs": 3}])
def test_replays_give_the_tokens_of_eager_runs(
    paged_model: RandomModel, options: dict[str, Any]
) -> None:
    """The session computes from what it recorded; fixed buffers are all that may change."""
    speculate = options.pop("speculate", False)
    expected = run_traffic(
        Recorded.open(paged_model, captures=False, **options).engine(speculate=speculate), seed=5
    )
    recorded = Recorded.open(paged_model, **options)
    assert run_traffic(recorded.engine(speculate=speculate), seed=5) == expected
    assert any(
        result.token_ids and result.finish_reasons == [FinishReason.ABORT]
        for result in expected.values()
    ), "none was aborted between two replays"
    replays, captures = recorded.session.replays, recorded.session.captures
    assert len(replays) > 3 * len(captures)
    assert {rows for rows, _ in replays} >= {1, 2}
    assert {width for _, width in replays} == {2, 4, 8, 12}
    assert recorded.runner.kv.reserved_tokens == 0


def test_a_runner_made_anew_never_replays_the_first_ones_graphs(
    paged_model: RandomModel,
) -> None:
    """ONNX Runtime keeps a graph with the addresses of blocks that are gone."""
    first = Recorded.open(paged_model)
    run_to_end(first.engine(), [make_sequence(0, [1, 2, 3], GREEDY)])
    known = set(first.session.captures)
    second = Recorded.open(paged_model)
    second.session.captures.update(first.session.captures)
    result = run_to_end(second.engine(), [make_sequence(0, [1, 2, 3], GREEDY)])[0]
    assert result.token_ids == generate(paged_model.decoder, [1, 2, 3], max_tokens=30)
    assert len(second.session.captures) > len(known)


@pytest.mark.parametrize(
    ("fault", "value"),
    [("refuses", True), ("forgets", True), ("strays", "logits"), ("strays", CANDIDATES_OUTPUT)],
)
def test_without_a_capture_that_works_all_runs_are_eager(
    paged_model: RandomModel,
    fault: str,
    value: bool | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ONNX Runtime may refuse a capture, or freeze an input that it should read again."""
    recorded = Recorded.open(paged_model)
    setattr(recorded.session, fault, value)
    with caplog.at_level(logging.WARNING):
        results = run_to_end(
            recorded.engine(), [make_sequence(i, [i, 2, 3], GREEDY) for i in range(3)]
        )
    for i in range(3):
        assert results[i].token_ids == generate(paged_model.decoder, [i, 2, 3], max_tokens=30)
    why = "when stream is capturing" if fault == "refuses" else "deviations from those without"
    assert why in caplog.text
    assert len(caplog.records) == 1
    assert len(recorded.session.replays) <= 1


@pytest.mark.parametrize("most", [1, 3, 8, 20, 64])
def test_buckets_hold_every_step(most: int) -> None:
    """And the largest is no larger than the largest step."""
    rows = [row_bucket(n + 1, most) for n in range(most)]
    assert all(n < bucket <= most for n, bucket in enumerate(rows))
    assert sorted(set(rows) - {1, 2, 4, most}) == list(range(8, most, 8))
    widths = [width_bucket(n + 1, most) for n in range(most)]
    for n, (width, before) in enumerate(widths, start=1):
        assert before < n <= width <= most
        assert before == 0 or before in {width for width, _ in widths}


def test_a_row_of_padding_writes_nothing(paged_model: RandomModel) -> None:
    """A capture, and the rows that fill a bucket, leave every other sequence's blocks alone."""
    recorded = Recorded.open(paged_model)
    engine = recorded.engine()
    for i in range(3):  # of a bucket of 4
        engine.add(make_sequence(i, [i, 2, 3], SamplingParams(max_tokens=4, temperature=0.0)))
    engine.step()
    model: Any = recorded.runner.model
    before = [held.array.copy() for held in model._blocks]
    written = set()
    slots = recorded.runner.kv.slots

    def noted(rows: Any, positions: Any) -> Any:
        found = slots(rows, positions)
        written.update(found.tolist())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded.runner.kv, "slots", noted)
        engine.step()
    assert recorded.session.captures
    for held, known in zip(model._blocks, before, strict=True):
        shape = (N_BLOCKS * BLOCK, -1)
        changed = (held.array.reshape(shape) != known.reshape(shape)).any(axis=1)
        assert set(np.nonzero(changed)[0].tolist()) == written


@pytest.mark.usefixtures("short_blocks")
def test_memory_of_graphs_is_left_when_blocks_take_the_rest(
    paged_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runner's blocks are free by then, as they would not be in a cycle of references."""
    held: list[weakref.ref[HostBuffer]] = []

    def buffer(n_bytes: int) -> HostBuffer:
        # Keys and values of two layers.
        assert not any(one() for one in held[:-4]), "memory of another runner"
        made = HostBuffer(n_bytes)
        held.append(weakref.ref(made))
        return made

    n_tokens = []
    gc.disable()
    try:
        for graph_bytes in (0, 2**13):
            held.clear()
            opened: list[RecordingSession] = []
            backend = recording_backend(2**20, graph_bytes, opened)._replace(
                bind_blocks=partial(bind_cuda_blocks, buffer=buffer)
            )
            monkeypatch.setitem(BACKENDS, "cuda", backend)
            runner = open_gpu_runner("cuda", paged_model.graph, paged_model.config, max_num_seqs=3)
            n_tokens.append(runner.kv.budget_tokens)
            assert opened[0].captures
            del runner
    finally:
        gc.enable()
    # Of 1, 2 and 3 rows, four widths, and what the captures had taken by then.
    block = BLOCK * 2 * 2 * 2 * 16 * 4
    assert n_tokens[0] == int(0.9 * 2**20) // block * BLOCK
    assert n_tokens[1] == int(0.9 * (2**20 - (12 + 1) * 2**13)) // block * BLOCK < n_tokens[0]


@pytest.mark.usefixtures("short_blocks")
def test_a_session_that_cannot_capture_is_opened_without(
    paged_model: RandomModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_graph: Path, _stream: Any) -> Any:
        raise NoDeviceError("this session cannot use the graph capture feature")

    backend = recording_backend(2**20)
    monkeypatch.setitem(BACKENDS, "cuda", backend._replace(open_capturing=refuse))
    runner = open_gpu_runner("cuda", paged_model.graph, paged_model.config, max_num_seqs=2)
    result = run_to_end(Engine(runner, chunk_size=16), [make_sequence(0, [1, 2, 3], GREEDY)])[0]
    assert len(result.token_ids) == GREEDY.max_tokens
    assert "the graph capture feature" in caplog.text
