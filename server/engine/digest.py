"""A digest of a model's answers, which are the same bits on every CPU by operators of our own.

It covers tokens, greedy and drawn, and log-probabilities, of prompts' tokens too: what clients can
see. A log-probability depends on every logit, so hashing the logits themselves would tell no more.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import onnx

from kvasir.kernels.fuse import fuse
from kvasir.kernels.graph import DOMAIN, Mismatch, parts
from kvasir.kernels.library import Library, load
from kvasir.kernels.page import page
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import MANIFEST_FILE, load_model_dir
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.packed import open_decoder
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence

RULES = 1  # one more after a change of what operators, sampler or the requests below compute
# Operators of ONNX Runtime that move numbers, choose some, or compute one from few, rounded
# correctly. TopK takes the first of equal numbers.
_EXACT = {
    *("Cast", "Concat", "Constant", "Expand", "Gather", "GatherElements", "GatherND", "Identity"),
    *("If", "Pad", "Range", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Transpose"),
    *("Unsqueeze", "Clip", "Equal", "Greater", "Less", "Not", "ReduceMax", "Relu", "TopK", "Where"),
    *("Add", "Div", "Mul", "Neg", "Sub"),
}
_PROMPT_LENGTHS = (1, 20, 90)  # the last has more than a block of keys and values
_NEW_TOKENS = 6
_SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"top_k": 40})


def compute_digest(graph: Path, config: TransformerConfig, library: Library) -> str:
    """Return the digest of a decoder in a graph: "RULES-", and a hash in hex.

    Raises Mismatch if operators of our own do not compute all that may differ between CPUs.
    """
    if config.encoder is not None:
        raise Mismatch("an encoder-decoder answers about a source")
    model = onnx.load(graph, load_external_data=False)
    if config.recurrence is None:  # as open_decoder does
        with suppress(Mismatch):
            model = page(model)
    model, _ = fuse(model)
    for node in (node for part in parts(model.graph) for node in part.node):
        if node.domain != DOMAIN and (node.domain or node.op_type not in _EXACT):
            raise Mismatch(f"{node.op_type} is computed by ONNX Runtime, in an order of the CPU's")
    lengths = sorted({min(n, config.max_model_len - _NEW_TOKENS) for n in _PROMPT_LENGTHS})
    requests = list[Sequence]()
    for n_tokens in lengths:
        prompt_ids = [(7919 * i * i + n_tokens) % config.vocab_size for i in range(n_tokens)]
        for i, sampling in enumerate(_SAMPLINGS):
            params = SamplingParams(
                max_tokens=_NEW_TOKENS,
                seed=i,
                logprobs=2,
                prompt_logprobs=None if i else 2,
                **sampling,  # type: ignore[arg-type]
            )
            requests.append(Sequence(len(requests), prompt_ids, params, frozenset(), 0.0))
    runner = open_decoder(
        graph,
        config,
        library,
        max_num_seqs=len(requests),
        max_model_len=lengths[-1] + _NEW_TOKENS,
        prefix_cache_bytes=0,
    )
    engine = Engine(runner, chunk_size=256)
    for request in requests:
        engine.add(request)
    answers: list[list[object]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step()[0]:
            found = output.token_id, output.logprobs, output.prompt_logprobs
            answers[output.sequence_id] += found
    return f"{RULES}-{hashlib.sha256(repr(answers).encode()).hexdigest()[:32]}"


def find_digest(directory: Path) -> tuple[str | None, str]:
    """Return the digest of a model directory on this machine, or the reason why there is none."""
    model, library = load_model_dir(directory), load("auto", None)
    if isinstance(library, str):
        return None, library
    try:
        return compute_digest(model.graph_path, model.config, library), ""
    except Mismatch as mismatch:
        return None, str(mismatch)


def write_digest(directory: Path) -> str:
    """Note the digest in a model directory's manifest; return the reason if there is none."""
    digest, reason = find_digest(directory)
    manifest = directory / MANIFEST_FILE
    values = json.loads(manifest.read_text("utf-8")) | {"digest": digest}
    manifest.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return reason
