"""A model as the engine sees it: the limits of its texts, its runs, and their first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvasir.model.config import TransformerConfig
from kvasir.model.platform.machine import available_memory
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.kv.store import KVStore
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import Sequence, SequenceStatus


def check_max_model_len(wanted: int | None, config: TransformerConfig) -> int:
    """Return the model's limit or a lower one. Raises ValueError for one that it cannot meet."""
    limit = config.max_model_len if wanted is None else wanted
    if not 2 <= limit <= config.max_model_len:
        raise ValueError(
            f"max_model_len {limit} must be between 2 and the model's {config.max_model_len}"
        )
    return limit


def kv_memory(given: int | None, n_models: int) -> int:
    """Return the bytes of a KV cache: by default half of what is free, divided by the models."""
    return available_memory() // (2 * n_models) if given is None else given


class ContextLimits(NamedTuple):
    """The most tokens of a prompt and its continuation or, with an encoder, of a target.

    max_source_len: of a source; None without an encoder.
    """

    max_model_len: int
    max_source_len: int | None = None

    @property
    def prompt(self) -> int:
        """The most tokens of a prompt, or of a source."""
        return self.max_source_len or self.max_model_len

    def after(self, n_prompt: int) -> int:
        """Return the most tokens that may follow a prompt of `n_prompt`."""
        return self.max_model_len - (0 if self.max_source_len else n_prompt)


class Runner(Protocol):
    """A model and its KV cache: `OnnxRunner`, `PagedRunner`, or a function of tokens in tests.

    drafts_exactly: a token has the same bits in a draft as alone.
    """

    max_model_len: int
    vocab_size: int
    drafts_exactly: bool
    decode_seconds: float  # spent so far in runs of decodes and drafts, without prompts

    @property
    def max_source_len(self) -> int | None:
        """See ContextLimits."""

    @property
    def kv(self) -> KVStore:
        """The KV cache."""

    def run(self, batch: StepBatch) -> Logits:
        """Return the logits of `batch.chunks`, in order; valid until the next run."""


def group_neighbours(
    chunks: list[Chunk], may_run: Callable[[list[Chunk]], bool]
) -> list[list[Chunk]]:
    """Group chunks for runs, in their order: each joins the last group if that may run with it."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and may_run([*groups[-1], chunk]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def warm_up(runner: Runner, n_tokens: int = 2, n_rows: int = 1) -> None:
    """Run a prefill, a decode of `n_rows` and a step with both, so that no request pays for them.

    One row has no step with both.
    """
    sequences = []
    for length in [n_tokens, *[1] * (n_rows - 1)]:
        admitted = runner.kv.admit(length, 0, [])
        assert admitted is not None
        params = SamplingParams(max_tokens=1)
        sequences.append(Sequence(-1, [0] * length, params, frozenset(), 0.0, rows=[admitted[0]]))
    first, *rest = sequences
    prefill = Chunk(first, 0, n_tokens, 1)
    runner.run(StepBatch(prefills=[prefill]))
    decodes = [Chunk(sequence, 0, 1, 1) for sequence in rest]
    for sequence in rest:
        sequence.status = SequenceStatus.RUNNING
    if rest:
        runner.run(StepBatch(decodes, [None, *rest], [prefill]))
    first.status, first.n_computed = SequenceStatus.RUNNING, n_tokens - 1
    runner.run(StepBatch([Chunk(first, n_tokens - 1, 1, 1), *decodes], [*sequences]))
    for sequence in sequences:
        runner.kv.free(sequence.rows[0])
