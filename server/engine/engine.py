"""The engine: add a sequence, abort it, step. One thread owns it, and only the model blocks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvasir.server.engine.adapters.loaded import GraphAdapters
from kvasir.server.engine.batch import Chunk, PromptPart, StepBatch, StepStats
from kvasir.server.engine.model_runner import ContextLimits, Runner
from kvasir.server.engine.sampling.beams import BeamSearch, Hypothesis
from kvasir.server.engine.sampling.candidates import candidate_logprobs, choose
from kvasir.server.engine.sampling.logits import SCORING_LOGITS_BYTES, Logits
from kvasir.server.engine.sampling.params import Floats, TokenLogprobs, token_logprobs
from kvasir.server.engine.sampling.sampler import sample, verify
from kvasir.server.engine.sampling.speculation import Speculation
from kvasir.server.engine.scheduler import Scheduler
from kvasir.server.engine.sequence import FinishReason, Sequence
from kvasir.server.engine.step_capacity import StepCapacity

if TYPE_CHECKING:  # it imports ONNX Runtime
    from kvasir.kernels.library import Library


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The effect of a step on one sequence.

    token_id: None if it ended without a new token. prompt_logprobs: in the first output, if the
    sequence asked for them: of each prompt token except the first. finish_reason: set in the last
    output; each sequence has exactly one such. is_predicted: the client's prediction had the token.
    """

    sequence_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    is_predicted: bool = False


@dataclass(frozen=True, slots=True)
class BeamOutput(TokenOutput):
    """The end of a beam search. hypotheses: the best texts, best first."""

    hypotheses: list[Hypothesis] = field(default_factory=list)


class Engine:
    """Continuous batching over one model.

    chunk_size: most prompt tokens in a step. itl_target: seconds of a step with streams, which runs
    fewer prompt tokens for it; see StepCapacity. speculate: draft tokens where that saves time;
    unless the runner drafts exactly, rounding then depends on the load. library: the runner's
    operators, for who asks what computes. adapters: how the runner takes some, if it does. clock:
    seconds. Raises ValueError for a chunk_size below 2.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        chunk_size: int,
        itl_target: float | None = 0.0,
        speculate: bool = False,
        library: Library | None = None,
        adapters: GraphAdapters | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if chunk_size < 2:
            why = "runs of one token round differently"
            raise ValueError(f"chunk_size must be at least 2, not {chunk_size}: {why}")
        from kvasir.server.engine.grammar.compiler import TokenMasks  # noqa: PLC0415  llguidance

        scoring = max(2, min(chunk_size, SCORING_LOGITS_BYTES // (4 * runner.vocab_size)))
        self.runner = runner
        self.kv = runner.kv
        self.limits = ContextLimits(runner.max_model_len, runner.max_source_len)
        self.speculate = speculate and runner.vocab_size <= sys.maxunicode  # see Source
        self.library = library
        self.adapters = adapters
        capacity = StepCapacity(chunk_size, itl_target)
        self.scheduler = Scheduler(self.kv, capacity, scoring_chunk_size=scoring)
        self._clock = clock
        self._masks = TokenMasks(runner.vocab_size)
        self._sequences: dict[int, Sequence] = {}

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._sequences)

    @property
    def max_num_seqs(self) -> int:
        """The number of sequences that can run at once."""
        return self.kv.max_num_seqs

    @property
    def occupancy(self) -> tuple[int, float]:
        """The number of clients' sequences in a slot, and the reserved share of the KV cache."""
        n_held = sum(not sequence.is_background for sequence in self.scheduler.held)
        return n_held, self.kv.reserved_tokens / self.kv.budget_tokens

    def release_idle_memory(self) -> None:
        """Return memory that only a next sequence would use to the operating system."""
        self.kv.release_idle_memory()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it could never run; admission refuses such."""
        n_prompt, n_after = len(sequence.prompt_ids), sequence.n_after_prompt
        n_rows = sequence.params.n_rows
        fits = 1 <= n_prompt <= self.limits.prompt and n_after <= self.limits.after(n_prompt)
        fits_budget = n_rows * self.kv.reservation(n_prompt, n_after) <= self.kv.budget_tokens
        if not (fits and fits_budget and n_rows <= self.max_num_seqs):
            raise ValueError(f"{n_prompt} prompt and {n_after} new tokens cannot fit")
        if self.speculate:
            sequence.speculation = Speculation(sequence.prompt_ids, sequence.prediction)
        try:
            self._sequences[sequence.id] = sequence
            self.scheduler.add(sequence)
        except BaseException:
            self._sequences.pop(sequence.id, None)
            self.scheduler.discard(sequence)
            raise

    def abort(
        self, sequence_id: int, reason: FinishReason = FinishReason.ABORT
    ) -> TokenOutput | None:
        """End a sequence between two steps; return its last output, or None if it has ended."""
        sequence = self._sequences.get(sequence_id)
        return self._finish(sequence, reason) if sequence else None

    def step(self) -> tuple[list[TokenOutput], StepStats]:
        """Advance every running sequence by a token, or more after a draft, and some prompts."""
        started, decoded = self._clock(), self.runner.decode_seconds
        preempted = self.scheduler.preempted()
        outputs = [self._finish(sequence, FinishReason.ABORT) for sequence in preempted]
        batch = self.scheduler.schedule(started)
        logits = self._run(batch)
        outputs += self._sample(batch, logits)
        seconds = self._clock() - started
        self.scheduler.record_step(batch, seconds, self.runner.decode_seconds - decoded)
        return outputs, self._figures(batch, started, seconds)

    def _run(self, batch: StepBatch) -> Logits:
        """Run the model, and compute the masks of constrained texts beside it."""
        finish_masks = self._masks.begin(
            [
                (chunk.sequence.constraint, chunk.sequence.ending_ids)
                for chunk in batch.chunks
                if chunk.sequence.constraint is not None and chunk.yields_token
            ]
        )
        logits = self.runner.run(batch)
        finish_masks()
        return logits

    def _sample(self, batch: StepBatch, logits: Logits) -> list[TokenOutput]:
        """Record all chunks as computed, and continue their sequences."""
        ends = list(accumulate(chunk.n_logits for chunk in batch.chunks))
        tokens: dict[int, int] = {}  # by row, where candidates tell
        if logits.candidates is not None:
            wanted = [
                (end - 1, chunk.sequence)
                for chunk, end in zip(batch.chunks, ends, strict=True)
                if chunk.yields_token and not chunk.draft and chunk.sequence.beams is None
            ]
            tokens = choose(logits.candidates, wanted, self.runner.vocab_size)
        outputs = []
        for chunk, end in zip(batch.chunks, ends, strict=True):
            outputs += self._update(chunk, logits, end, tokens.get(end - 1))
        return outputs

    def _figures(self, batch: StepBatch, started: float, seconds: float) -> StepStats:
        prompts = [
            c.sequence for c in batch.prefills if c.begins_prompt and not c.sequence.is_scored
        ]
        looked_up = prompts if self.kv.cache.capacity else []
        n_prefill = sum(chunk.count for chunk in batch.prefills)
        n_before = sum(chunk.count * (chunk.start + chunk.end) / 2 for chunk in batch.prefills)
        return StepStats(
            n_decode=len(batch.decodes) + len(batch.drafts),
            n_prefill_tokens=n_prefill,
            prefill_capacity=self.scheduler.prefill_capacity,
            n_queried=sum(len(sequence.prompt_ids) for sequence in looked_up),
            n_cached=sum(sequence.n_cached for sequence in looked_up),
            n_drafted=sum(len(chunk.draft) for chunk in batch.drafts),
            n_accepted=sum(c.sequence.n_computed - c.start - 1 for c in batch.drafts),
            seconds=seconds,
            n_before=n_before / max(1, n_prefill),
            slowdown=self.scheduler.capacity.cost.slowdown,
            started=started,
            prompts=tuple(map(PromptPart.of, batch.prefills)),
            streams=tuple(c.sequence.id for c in (*batch.decodes, *batch.drafts)),
        )

    def _update(
        self, chunk: Chunk, logits: Logits, end: int, token: int | None
    ) -> list[TokenOutput]:
        """Record a chunk as computed, and append the tokens that follow.

        end: of its logits. token: the one after them if it is known.
        """
        sequence, first = chunk.sequence, end - chunk.n_logits
        if sequence.scores is not None:
            self._score(chunk, logits[first:end], sequence.scores)
        if chunk.draft:
            return self._verify(chunk, logits, first)
        self.scheduler.record(chunk, chunk.count)
        if chunk.yields_token:
            if sequence.beams is not None:
                return self._search(sequence, sequence.beams, logits[first:end])
            if token is None:
                token = sample(logits[end - 1 : end][0], sequence)
            return [self._append(sequence, token, logits, end - 1)]
        if chunk.completes_prompt and not sequence.params.max_tokens:
            scored = TokenOutput(sequence.id, None, prompt_logprobs=sequence.scores)
            return [self._finish(sequence, FinishReason.LENGTH, scored)]
        return []

    def _verify(self, chunk: Chunk, logits: Logits, first: int) -> list[TokenOutput]:
        """Append the tokens that a draft yields; first: of its rows of logits."""
        sequence, outputs = chunk.sequence, list[TokenOutput]()
        rows = logits[first : first + chunk.n_logits]
        for token in verify(rows, sequence, chunk.draft):
            # Keys and values of rejected draft tokens do not count.
            self.scheduler.record(chunk, len(outputs) + 1)
            outputs.append(self._append(sequence, token, logits, first + len(outputs)))
            if outputs[-1].finish_reason is not None:
                break
        return outputs

    def _score(self, chunk: Chunk, logits: Floats, scores: list[TokenLogprobs]) -> None:
        """Note the log-probabilities of the prompt tokens that follow a chunk's positions."""
        alternatives = chunk.sequence.params.prompt_logprobs or 0
        following = chunk.sequence.prompt_ids[1 : chunk.end + 1]
        # A chunk may repeat the last position of the one before it.
        for position in range(max(chunk.start, len(scores)), len(following)):
            row = logits[position - chunk.start]
            scores.append(token_logprobs(row, following[position], alternatives))

    def _search(self, sequence: Sequence, beams: BeamSearch, logits: Floats) -> list[TokenOutput]:
        """Continue the texts of a beam search, whose logits are [n, vocab]."""
        if not np.isfinite(logits.max()):  # NaN, if there is one
            return [self._finish(sequence, FinishReason.ERROR)]
        is_over = beams.advance(logits)
        sequence.output_ids = (beams.finished if is_over else beams.running)[0].token_ids
        if not is_over:
            return []
        sequence.first_token_at = perf_counter()
        best = BeamOutput(sequence.id, None, hypotheses=beams.finished)
        return [self._finish(sequence, FinishReason.STOP, best)]

    def _append(
        self, sequence: Sequence, token_id: int | None, logits: Logits, row: int
    ) -> TokenOutput:
        """Append a token, chosen from a row of logits; end the sequence if it is the last."""
        if token_id is None:
            return self._fail(sequence)
        sequence.output_ids.append(token_id)
        is_predicted = sequence.speculation is not None and sequence.speculation.add(token_id)
        params, scores = sequence.params, None
        if sequence.first_token_at is None:
            sequence.first_token_at, scores = perf_counter(), sequence.scores
        logprobs = None
        if (n_top := params.logprobs) is not None:
            if logits.candidates is not None:
                logprobs = candidate_logprobs(logits.candidates, row, token_id, n_top)
            logprobs = logprobs or token_logprobs(logits[row : row + 1][0], token_id, n_top)
        output = TokenOutput(sequence.id, token_id, logprobs, scores, is_predicted=is_predicted)
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
        """End a sequence without a next token: its grammar or non-finite logits allow none."""
        is_stuck = sequence.constraint is not None and sequence.constraint.error
        return self._finish(sequence, FinishReason.GRAMMAR if is_stuck else FinishReason.ERROR)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, output: TokenOutput | None = None
    ) -> TokenOutput:
        """End a sequence, and return `output` marked as its last."""
        self.scheduler.finish(sequence)
        del self._sequences[sequence.id]
        output = output or TokenOutput(sequence.id, None)
        return replace(output, finish_reason=reason)
