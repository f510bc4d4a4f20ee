"""Digests of models' answers by path, as JSON: python -m tests.arm.answers LIBRARY PATHS MODELS.

PATHS are of the library, with commas between; MODELS is a folder of folders with a graph and
config.json. It runs in emulation, so it imports no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvasir.kernels.library import Library
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import CONFIG_FILE, ENCODER_GRAPH_FILE, GRAPH_FILE
from kvasir.server.engine.digest import compute_digest
from kvasir.server.engine.encoder.runner import EncoderRunner
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams
from kvasir.server.engine.seq2seq.runner import Seq2SeqRunner
from kvasir.server.engine.sequence import Sequence

LENGTHS = (1, 2, 7, 20, 65)  # of texts and sources, as far as the model reads
WAYS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"top_p": 0.95}, {"beams": BeamParams(3)})


def digest(folder: Path, library: Library) -> str:
    graph, config = folder / GRAPH_FILE, TransformerConfig.load(folder / CONFIG_FILE)
    if config.encoder is None and config.pooling is None:
        return compute_digest(graph, config, library)
    answers = encode if config.encoder is None else translate
    return hashlib.sha256(b"".join(answers(graph, config, library))).hexdigest()[:32]


def make_texts(config: TransformerConfig) -> list[list[int]]:
    lengths = sorted({min(n, config.max_model_len) for n in LENGTHS})
    return [[(7919 * i * i + n) % config.vocab_size for i in range(n)] for n in lengths]


def encode(graph: Path, config: TransformerConfig, library: Library) -> Iterator[bytes]:
    """Yield the vectors of texts, and those of their tokens."""
    runner, params = EncoderRunner(graph, config, library=library), SamplingParams(max_tokens=0)
    for wants_tokens in (False, True):
        texts = [
            EncoderSequence(i, ids, params, frozenset(), 0.0, wants_tokens=wants_tokens)
            for i, ids in enumerate(make_texts(config))
        ]
        yield from (vectors.tobytes() for vectors in runner.run(texts))


def translate(graph: Path, config: TransformerConfig, library: Library) -> Iterator[bytes]:
    """Yield the tokens and log-probabilities of targets: greedy, drawn and searched."""
    assert config.encoder is not None
    encoder, prefix = graph.with_name(ENCODER_GRAPH_FILE), list(config.target_prefix)
    runner = Seq2SeqRunner(encoder, graph, config, max_num_seqs=8, library=library)
    engine, ending = Engine(runner, chunk_size=256), frozenset(config.eos_token_ids)
    for i, ids in enumerate(make_texts(config.encoder)):
        for j, way in enumerate(WAYS):
            params = SamplingParams(max_tokens=8, seed=j, logprobs=2, **way)
            engine.add(Sequence(3 * i + j, ids, params, ending, 0.0, target_prefix=prefix))
    while engine.has_work:
        yield repr(engine.step()[0]).encode()


if __name__ == "__main__":
    library_file, names, models = sys.argv[1:]
    folders = sorted(config.parent for config in Path(models).glob(f"*/{CONFIG_FILE}"))
    found = {
        path: {folder.name: digest(folder, Library(Path(library_file), path)) for folder in folders}
        for path in names.split(",")
    }
    sys.stdout.write(json.dumps(found))
