"""The engine: add a sequence, abort it, step. One thread owns it; nothing here blocks on anything but the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, Protocol

from model.config import DecoderConfig
from server.engine.grammar.constraints import TokenMasks
from server.engine.kv.blocks import KVBlocks
from server.engine.kv.rows import KVRows
from server.engine.prefix_cache import PrefixCache
from server.engine.sampling import Floats, TokenLogprobs, sample, token_logprobs
from server.engine.scheduler import Batch, Chunk, Scheduler
from server.engine.sequence import FinishReason, Sequence, SequenceStatus, SequenceTimes
from server.engine.speculation import DraftPolicy, Speculation, verify

StepKind = Literal["decode", "mixed", "prefill"]

SCORING_LOGITS_BYTES = 64 * 2**20  # bound on the logits of one chunk of a prompt that is scored


def check_max_model_len(wanted: int | None, config: DecoderConfig) -> int:
    """The model's own limit, or a lower one. Raises ValueError for one that the model cannot meet."""
    limit = config.max_model_len if wanted is None else wanted
    if not 2 <= limit <= config.max_model_len:
        raise ValueError(
            f"max_model_len {limit} must be between 2 and the model's {config.max_model_len}"
        )
    return limit


class Runner(Protocol):
    """What the engine needs of a model: `server.engine.runner.OnnxRunner`, or a function of token ids in tests."""

    max_model_len: int
    vocab_size: int

    @property
    def rows(self) -> KVRows | KVBlocks: ...

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocab]: a row per decode, then each prefill's, then each draft's, in order.

        Valid until the next run.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What a step did to one sequence. `finish_reason` marks its last output: each sequence has exactly one such.

    token_id: None when it ended without a new token. prompt_logprobs: with the first output of a sequence that asked
    for them, one entry for each prompt token but the first.
    """

    sequence_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    times: SequenceTimes | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in figures.

    n_decode: sequences that were continued. n_prefill_tokens: prompt tokens that ran. n_queried: tokens of the prompts
    that were looked up in the prefix cache; n_cached: those of them that it had. n_drafted: guesses that were checked;
    n_accepted: those of them that saved a step.
    """

    n_decode: int
    n_prefill_tokens: int
    n_queried: int
    n_cached: int
    n_drafted: int
    n_accepted: int
    seconds: float

    @property
    def kind(self) -> StepKind:
        if not self.n_prefill_tokens:
            return "decode"
        return "mixed" if self.n_decode else "prefill"


class Engine:
    """Continuous batching over one model.

    chunk_size: most prompt tokens run in one step, at least 2. prefix_cache: over the runner's rows; None is without.
    speculate: guess tokens where few sequences run; what a sequence gets then depends on the load, by rounding.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        chunk_size: int,
        prefix_cache: PrefixCache | None = None,
        speculate: bool = False,
    ) -> None:
        if chunk_size < 2:
            raise ValueError(
                f"chunk_size must be at least 2, not {chunk_size}: one-token runs are not bit-identical"
            )
        scoring = max(2, min(chunk_size, SCORING_LOGITS_BYTES // (4 * runner.vocab_size)))
        self.runner = runner
        self.speculate = speculate
        self.masks = TokenMasks(runner.vocab_size)
        rows = runner.rows
        cache = (
            rows
            if isinstance(rows, KVBlocks)
            else prefix_cache or PrefixCache(rows, budget_bytes=0)
        )
        self.scheduler = Scheduler(rows, cache, chunk_size=chunk_size, scoring_chunk_size=scoring)
        self._sequences: dict[int, Sequence] = {}

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def kv_budget_tokens(self) -> int:
        return self.runner.rows.budget_tokens

    def kv_tokens_needed(self, n_prompt: int, max_tokens: int) -> int:
        """What a sequence takes of the budget at its most."""
        return self.runner.rows.n_needed(n_prompt, max_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError for one that could never run; the API refuses such at the door."""
        n_prompt, max_tokens = len(sequence.prompt_ids), sequence.params.max_tokens
        n_needed = self.kv_tokens_needed(n_prompt, max_tokens)
        if (
            not n_prompt
            or sequence.n_reserved > self.max_model_len
            or n_needed > self.kv_budget_tokens
        ):
            raise ValueError(f"{n_prompt} prompt and {max_tokens} new tokens cannot fit")
        if self.speculate and sequence.constraint is None:  # a guess would need a mask of its own
            sequence.speculation = Speculation(DraftPolicy())
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def abort(
        self, sequence_id: int, reason: FinishReason = FinishReason.ABORT
    ) -> TokenOutput | None:
        """End a sequence now, between two steps; its terminal output, or None when it has ended already."""
        sequence = self._sequences.get(sequence_id)
        return self._finish(sequence, reason, TokenOutput(sequence.id, None)) if sequence else None

    def give_back_memory(self) -> None:
        """Return what free rows still hold to the operating system; worth it when no work is in sight."""
        self.runner.rows.give_back()

    def step(self) -> tuple[list[TokenOutput], StepStats]:
        """Schedule, run, sample, update: a token for every running sequence, more after a draft; chunks of prompts."""
        started = perf_counter()
        batch = self.scheduler.schedule()
        finish_masks = self.masks.begin(_continued(batch))
        logits = self.runner.run(batch)
        finish_masks()
        outputs = self._update(batch, logits)
        begun = [c.sequence for c in batch.prefills if c.begins_prompt and not c.sequence.is_scored]
        looked_up = begun if self.scheduler.cache.capacity else []
        return outputs, StepStats(
            n_decode=len(batch.decodes) + len(batch.drafts),
            n_prefill_tokens=sum(chunk.count for chunk in batch.prefills),
            n_queried=sum(len(sequence.prompt_ids) for sequence in looked_up),
            n_cached=sum(sequence.n_cached for sequence in looked_up),
            n_drafted=sum(len(chunk.draft) for chunk in batch.drafts),
            n_accepted=sum(chunk.sequence.n_computed - chunk.start - 1 for chunk in batch.drafts),
            seconds=perf_counter() - started,
        )

    def _update(self, batch: Batch, logits: Floats) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        ready: list[Sequence] = []
        places: list[int] = []  # of their next tokens' logits
        n = 0
        for chunk in (*batch.decodes, *batch.prefills):
            sequence = chunk.sequence
            self._score(chunk, logits[n : n + chunk.n_logits])
            n += chunk.n_logits
            self.scheduler.computed(chunk)
            if sequence.status is SequenceStatus.PREFILLING:
                continue
            if sequence.params.max_tokens == 0:
                scored = TokenOutput(sequence.id, None, prompt_logprobs=sequence.scores)
                outputs.append(self._finish(sequence, FinishReason.LENGTH, scored))
            else:
                ready.append(sequence)
                places.append(n - 1)
        if ready:
            adjacent = places[-1] < len(places)  # always, but for the last token of a scored prompt
            rows = logits[: len(places)] if adjacent else logits[places]
            tokens = sample(rows, ready)
            outputs += [
                self._append(s, t, row) for s, t, row in zip(ready, tokens, rows, strict=True)
            ]
        for chunk in batch.drafts:
            outputs += self._verify(chunk, logits[n : n + chunk.n_logits])
            n += chunk.n_logits
        return outputs

    def _verify(self, chunk: Chunk, logits: Floats) -> list[TokenOutput]:
        """As many tokens as the draft was right, and one more."""
        sequence = chunk.sequence
        assert sequence.speculation is not None
        tokens = verify(logits, sequence, chunk.draft)
        sequence.speculation.record(sequence, chunk.draft, tokens)
        self.scheduler.computed(
            replace(chunk, count=len(tokens))
        )  # the keys of wrong guesses do not count
        return [
            self._append(sequence, token, row) for token, row in zip(tokens, logits, strict=False)
        ]

    def _score(self, chunk: Chunk, logits: Floats) -> None:
        """Log-probabilities of the prompt tokens that follow the chunk's positions."""
        sequence = chunk.sequence
        alternatives = sequence.params.prompt_logprobs
        if alternatives is None:
            return
        for position in range(chunk.start, min(chunk.end, len(sequence.prompt_ids) - 1)):
            if position == len(
                sequence.prompt_logprobs
            ):  # a one-token tail runs its predecessor again
                row = logits[position - chunk.start]
                scored = token_logprobs(row, sequence.prompt_ids[position + 1], alternatives)
                sequence.prompt_logprobs.append(scored)

    def _append(self, sequence: Sequence, token_id: int | None, row: Floats) -> TokenOutput:
        if token_id is None:
            return self._fail(sequence)
        sequence.output_ids.append(token_id)
        first = sequence.times.first_token is None
        if first:
            sequence.times.first_token = perf_counter()
        params = sequence.params
        output = TokenOutput(
            sequence.id,
            token_id,
            None if params.logprobs is None else token_logprobs(row, token_id, params.logprobs),
            sequence.scores if first else None,
        )
        ends = token_id in sequence.ending_ids
        if sequence.constraint is not None and token_id not in params.stop_token_ids:
            sequence.constraint.advance(token_id, ends=ends)
            if sequence.constraint.error:
                return self._fail(sequence)
            ends = ends or sequence.constraint.is_complete
        if ends:
            return self._finish(sequence, FinishReason.STOP, output)
        if len(sequence.output_ids) >= params.max_tokens:
            return self._finish(sequence, FinishReason.LENGTH, output)
        return output

    def _fail(self, sequence: Sequence) -> TokenOutput:
        """Nothing may come next: because of its grammar, or because its logits are no numbers."""
        is_stuck = sequence.constraint is not None and sequence.constraint.error
        reason = FinishReason.GRAMMAR if is_stuck else FinishReason.ERROR
        return self._finish(sequence, reason, TokenOutput(sequence.id, None))

    def _finish(self, sequence: Sequence, reason: FinishReason, output: TokenOutput) -> TokenOutput:
        """The sequence's terminal output: `output`, marked as the last."""
        self.scheduler.finish(sequence, reason)
        del self._sequences[sequence.id]
        return replace(output, finish_reason=reason, times=sequence.times)


def _continued(batch: Batch) -> list[Sequence]:
    """Sequences that get one token from a batch: all that do, but those with a draft."""
    complete = (chunk for chunk in batch.prefills if chunk.completes_prompt)
    return [c.sequence for c in (*batch.decodes, *complete) if c.sequence.params.max_tokens]
