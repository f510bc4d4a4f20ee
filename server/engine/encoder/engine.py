"""The engine of an encoder: each step runs whole texts, which wait until then."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from server.engine.encoder.sequence import EncoderOutput, EncoderSequence
from server.engine.engine import StepStats
from server.engine.sampling import Floats
from server.engine.sequence import FinishReason, SequenceStatus

MAX_PADDING = 1.5  # ratio of the positions of a run's rows to its tokens


class TextRunner(Protocol):
    """A model of texts: `EncoderRunner`, or a function in tests."""

    max_model_len: int

    def run(self, texts: list[EncoderSequence]) -> list[Floats]:
        """Return what each text asks for."""


class EncoderEngine:
    """Continuous batching of texts: those that arrive during a step can run in the next.

    token_budget: most tokens of a step, unless one text has more. max_num_seqs: most texts of a
    step. clock: seconds.
    """

    def __init__(
        self,
        runner: TextRunner,
        *,
        token_budget: int,
        max_num_seqs: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.runner = runner
        self.max_model_len = runner.max_model_len
        self.max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._clock = clock
        self._waiting: list[EncoderSequence] = []  # in the order of their queue keys
        self._running: list[EncoderSequence] = []

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._waiting)

    @property
    def occupancy(self) -> tuple[int, float]:
        """The number of clients' texts in this step, and the used share of no cache."""
        return sum(not sequence.is_background for sequence in self._running), 0.0

    def release_idle_memory(self) -> None:
        """Do nothing: no memory is kept between two steps."""

    def add(self, sequence: EncoderSequence) -> None:
        """Queue a text. Raises ValueError if it could never run; admission refuses such."""
        if not 1 <= len(sequence.prompt_ids) <= self.max_model_len:
            raise ValueError(f"{len(sequence.prompt_ids)} tokens cannot fit")
        insort(self._waiting, sequence, key=lambda waiting: waiting.queue_key)

    def abort(
        self, sequence_id: int, reason: FinishReason = FinishReason.ABORT
    ) -> EncoderOutput | None:
        """End a text between two steps; return its output, or None if it has ended."""
        for place, sequence in enumerate(self._waiting):
            if sequence.id == sequence_id:
                del self._waiting[place]
                return self._finish(sequence, reason)
        return None

    def step(self) -> tuple[list[EncoderOutput], StepStats]:
        """Run the first text that waits, and others with it."""
        started = self._clock()
        self._running = self._schedule()
        for sequence in self._running:
            sequence.status, sequence.scheduled_at = SequenceStatus.RUNNING, perf_counter()
        outputs, n_tokens = [], 0
        vectors = self.runner.run(self._running)
        for sequence, found in zip(self._running, vectors, strict=True):
            sequence.n_computed = len(sequence.prompt_ids)
            n_tokens += sequence.n_computed
            outputs.append(self._finish(sequence, FinishReason.STOP, found))
        self._running = []
        seconds = self._clock() - started
        # As many tokens as there were filled the step.
        return outputs, StepStats(0, n_tokens, n_tokens, 0, 0, 0, 0, seconds)

    def _schedule(self) -> list[EncoderSequence]:
        """Take the first text from the queue, and later ones of such length that they fit.

        Those in the background come last, and run only with each other.
        """
        chosen: list[EncoderSequence] = []
        others: list[EncoderSequence] = []
        n_tokens = longest = 0
        for sequence in self._waiting:
            length = len(sequence.prompt_ids)
            n_then, longest_then = n_tokens + length, max(longest, length)
            n_positions = longest_then * (len(chosen) + 1)
            fits = n_then <= self._token_budget and len(chosen) < self.max_num_seqs
            fits = fits and sequence.is_background is self._waiting[0].is_background
            if not chosen or (fits and n_positions <= MAX_PADDING * n_then):
                chosen.append(sequence)
                n_tokens, longest = n_then, longest_then
            else:
                others.append(sequence)
        self._waiting = others
        return chosen

    def _finish(
        self, sequence: EncoderSequence, reason: FinishReason, vectors: Floats | None = None
    ) -> EncoderOutput:
        sequence.status, sequence.finished_at = SequenceStatus.FINISHED, perf_counter()
        return EncoderOutput(sequence.id, None, finish_reason=reason, vectors=vectors)
