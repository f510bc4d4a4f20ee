"""The engine of an encoder: whole texts, several runs of them at a time.

One thread for each run wastes less of a processor than several threads for one, which wait for each
other at each of its operators. Only texts with which the processors are not busy get all threads.
"""

from __future__ import annotations

from bisect import insort
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import TYPE_CHECKING

from kvasir.server.engine.adapters.loaded import GraphAdapters
from kvasir.server.engine.batch import StepStats
from kvasir.server.engine.encoder.sequence import EncoderOutput, EncoderSequence
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.sequence import FinishReason, SequenceStatus

if TYPE_CHECKING:  # it imports ONNX Runtime
    from kvasir.kernels.library import Library
    from kvasir.server.engine.encoder.runner import EncoderRunner

TOKEN_BUDGET = 256  # of a run, unless another one is set
MAX_PADDING = 1.5  # ratio of the positions of a run's rows to its tokens


class EncoderEngine:
    """Continuous batching of texts: those that arrive during a step can run in the next.

    token_budget: most tokens of a run, unless one text has more. max_num_seqs: most texts of a
    run. library, adapters: see `Engine`.
    """

    def __init__(
        self,
        runner: EncoderRunner,
        *,
        token_budget: int,
        max_num_seqs: int,
        library: Library | None = None,
        adapters: GraphAdapters | None = None,
    ) -> None:
        self.runner = runner
        self.max_model_len = runner.max_model_len
        self.max_num_seqs = max_num_seqs
        self.library = library
        self.adapters = adapters
        self._token_budget = token_budget
        self._waiting: list[EncoderSequence] = []  # in the order of their queue keys
        self._runs: dict[Future[list[Floats]], tuple[list[EncoderSequence], float]] = {}
        self._threads = ThreadPoolExecutor(runner.max_runs, "encoder")

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._waiting or self._runs)

    @property
    def occupancy(self) -> tuple[int, float]:
        """The number of clients' texts that run, and the used share of no cache."""
        runs = list(self._runs.values())
        return sum(not text.is_background for texts, _ in runs for text in texts), 0.0

    def release_idle_memory(self) -> None:
        """Return memory that only runs need; called when nothing runs."""
        self.runner.release_idle_memory()

    def add(self, sequence: EncoderSequence) -> None:
        """Queue a text. Raises ValueError if it could never run; admission refuses such."""
        if not 1 <= len(sequence.prompt_ids) <= self.max_model_len:
            raise ValueError(f"{len(sequence.prompt_ids)} tokens cannot fit")
        insort(self._waiting, sequence, key=lambda waiting: waiting.queue_key)

    def abort(
        self, sequence_id: int, reason: FinishReason = FinishReason.ABORT
    ) -> EncoderOutput | None:
        """End a text between two steps; return its output, or None if it has ended.

        One that runs is computed to the end, which gives no further output.
        """
        for place, sequence in enumerate(self._waiting):
            if sequence.id == sequence_id:
                del self._waiting[place]
                return self._finish(sequence, reason)
        for sequence in (sequence for texts, _ in self._runs.values() for sequence in texts):
            if sequence.id == sequence_id and sequence.status is SequenceStatus.RUNNING:
                return self._finish(sequence, reason)
        return None

    def step(self) -> tuple[list[EncoderOutput], StepStats]:
        """Start as many runs as there may be, and wait until one ends."""
        alone = not self._runs and len(self._waiting) < self.runner.max_runs
        while self._waiting and len(self._runs) < self.runner.max_runs:
            texts = self._schedule()
            for sequence in texts:
                sequence.status, sequence.scheduled_at = SequenceStatus.RUNNING, perf_counter()
            started, run = perf_counter(), Future[list[Floats]]()
            if not alone:
                run = self._threads.submit(self.runner.run, texts, alone=False)
            self._runs[run] = texts, started
            if alone:
                run.set_result(self.runner.run(texts))
                break
        n_runs, outputs, n_tokens, seconds = len(self._runs), list[EncoderOutput](), 0, 0.0
        for run in wait(self._runs, return_when=FIRST_COMPLETED).done:
            texts, started = self._runs.pop(run)
            seconds += (perf_counter() - started) / n_runs  # of all threads
            for sequence, vectors in zip(texts, run.result(), strict=True):
                sequence.n_computed = len(sequence.prompt_ids)
                n_tokens += sequence.n_computed
                if sequence.status is SequenceStatus.RUNNING:
                    outputs.append(self._finish(sequence, FinishReason.STOP, vectors))
        # As many tokens as there were filled the step.
        return outputs, StepStats(0, n_tokens, n_tokens, 0, 0, 0, 0, seconds)

    def _schedule(self) -> list[EncoderSequence]:
        """Take the first text from the queue, and later ones of such length that they fit.

        Those in the background come last, and run only with each other.
        """
        chosen: list[EncoderSequence] = []
        waiting: list[EncoderSequence] = []
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
                waiting.append(sequence)
        self._waiting = waiting
        return chosen

    def _finish(
        self, sequence: EncoderSequence, reason: FinishReason, vectors: Floats | None = None
    ) -> EncoderOutput:
        sequence.status, sequence.finished_at = SequenceStatus.FINISHED, perf_counter()
        return EncoderOutput(sequence.id, None, finish_reason=reason, vectors=vectors)
