"""Checks of any GPU: figures of an export, and sequences that get the same tokens as alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvasir.model.directory import load_model_dir
from kvasir.model.records import Verification
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.gpu.session import open_gpu_runner
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence

# Largest difference of logits from PyTorch's in float32, in standard deviations, and smallest share
# of greedy tokens that are equal or near ties. Perplexity cannot test random weights: no attention
# at all would pass. In PyTorch, 4 bits change logits of the largest preset by 3.7 deviations, and
# leave it two of ten greedy tokens.
_LIMITS = {"bf16": (0.25, 0.95), "fp16": (0.05, 0.98), "int8": (0.35, 0.9), "int4": (4.5, 0.2)}
_ABORTED = frozenset({3, 7})
_ABORT_AFTER = 5  # tokens


class SkippedError(Exception):
    """A figure that this machine cannot give, and why."""


def open_runner(folder: Path, max_num_seqs: int, **options: Any) -> PagedRunner:
    """Open a model directory on the GPU that it was exported for; see `open_gpu_runner`."""
    model_dir = load_model_dir(folder)
    return open_gpu_runner(
        model_dir.manifest.device,
        model_dir.graph_path,
        model_dir.config,
        max_num_seqs=max_num_seqs,
        **options,
    )


def check_figures(figures: Verification, precision: str) -> None:
    """Raise AssertionError for logits that are wrong; rounding alone may choose at near ties."""
    error, largest = figures.max_logit_error, _LIMITS[precision][0]
    assert error < largest, f"logits differ by {error:.3f} deviations"
    assert figures.positions is not None
    assert figures.near_ties is not None
    agreement = figures.greedy_agreement + figures.near_ties / figures.positions
    smallest = _LIMITS[precision][1]
    assert agreement >= smallest, f"only {agreement:.1%} of tokens are PyTorch's, or near ties"


def check_promises(
    alone: Callable[[], PagedRunner],
    together: Callable[[], PagedRunner],
    lengths: tuple[int, ...],
    *,
    n_new: int,
    chunk_size: int,
) -> float:
    """Run prompts with shared beginnings beside each other, with too few blocks; abort some.

    alone, together: open the runner of one sequence, and that of several. lengths: of the prompts
    without their beginnings, which take no, one or two blocks. Returns the share of tokens equal to
    the sequence's alone among those that follow equal ones: after a difference all may differ.
    Raises AssertionError if a sequence does not end exactly once, or anything leaks.
    """
    runner = alone()
    size, generator = runner.kv.block_size, np.random.default_rng(0)
    common, *rests = (
        generator.integers(runner.vocab_size, size=n).tolist() for n in (2 * size, *lengths)
    )
    prompts = [common[: size * (i % 3)] + rest for i, rest in enumerate(rests)]
    expected = [generate(Engine(runner, chunk_size=2048), [prompt], n_new)[0] for prompt in prompts]
    del runner
    runner = together()
    engine = Engine(runner, chunk_size=chunk_size)
    equal = total = 0
    for _ in range(2):  # the second time, the blocks of the prompts' beginnings are cached
        answers = generate(engine, prompts, n_new, _ABORTED)
        assert runner.kv.reserved_tokens == 0, "an ended sequence still holds blocks"
        n_held = runner.kv.max_num_seqs - len(runner.kv.free_rows)
        assert n_held == 0, f"ended sequences still hold {n_held} rows"
        for i, (tokens, wanted) in enumerate(zip(answers, expected, strict=True)):
            assert len(tokens) == len(wanted) or i in _ABORTED, "a sequence ended early"
            pairs = enumerate(zip(tokens, wanted, strict=False))
            n_equal = next((n for n, (token, other) in pairs if token != other), len(tokens))
            equal += n_equal
            total += min(n_equal + 1, len(tokens))
    return equal / total


def generate(
    engine: Engine, prompts: list[list[int]], n_new: int, aborted: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Return the greedy tokens of every prompt; abort those numbered in `aborted` after five."""
    tokens: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=n_new, temperature=0.0)
        engine.add(Sequence(i, prompt, params, frozenset(), perf_counter()))
    while engine.has_work:
        for output in engine.step()[0]:
            assert output.sequence_id not in ended, "an output after the last one"
            if output.token_id is not None:
                tokens[output.sequence_id].append(output.token_id)
            if output.finish_reason is not None:
                ended.add(output.sequence_id)
        ended |= {i for i in aborted - ended if len(tokens[i]) >= _ABORT_AFTER and engine.abort(i)}
    assert len(ended) == len(prompts), "a sequence never ended"
    return tokens
