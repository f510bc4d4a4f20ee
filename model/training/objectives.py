"""Objectives: a batch's loss, and the measurements of what is held out.

A network learns next tokens or, as an encoder, masked ones; the document of a query; the label of a
text; or, with a source before it, a target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.network.gradients import Measure
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import generate
from kvasir.model.training.data.masking import IGNORED
from kvasir.model.training.data.pairs import LabelData, PairBatch, PairData, rank_documents
from kvasir.model.training.data.tokens import Batch, TokenData
from kvasir.model.training.data.translations import TranslationBatch, TranslationData
from kvasir.model.training.distributed import Processes
from kvasir.model.training.flops import flops_per_token, flops_per_translation
from kvasir.model.training.metrics import Evaluation
from kvasir.model.training.settings import TrainSettings

Data = TokenData | PairData | TranslationData
_SAMPLE_TOKENS = 64
_SAMPLE_PROMPT_TOKENS = 16


@dataclass
class Objective(ABC):
    """The loss of one kind of data. module: the decoder as the processes share it."""

    decoder: Transformer
    module: nn.Module
    tokenizer: Tokenizer
    data: Any
    settings: TrainSettings
    processes: Processes
    dtype: torch.dtype  # of products

    @property
    @abstractmethod
    def row_size(self) -> tuple[int, int]:
        """A batch's mean tokens per row, and the FLOPs of learning them."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the summed cross-entropy, in nats, of a batch's targets in this process."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Measure what is held out; all processes return the same."""

    def sample(self, step: int) -> tuple[str, str]:  # noqa: ARG002
        """Return the beginning of a text that is held out, and what the network makes of it."""
        return "", ""

    @property
    def n_rows(self) -> int:
        """The rows of a batch in this process."""
        return self.processes.rows_per_process(self.settings.batch_size)

    def precision(self) -> torch.autocast:
        """Return a block whose products are in bfloat16, where that is faster.

        Parameters, gradients and the optimizer's state are not.
        """
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.processes.device.type, dtype=torch.bfloat16, enabled=enabled)


class NextTokens(Objective):
    """The cross-entropy of the next tokens, or of masked ones."""

    data: TokenData

    @property
    def row_size(self) -> tuple[int, int]:
        """The tokens of a row, and their FLOPs."""
        context = self.settings.context
        return context, context * flops_per_token(self.decoder, context)

    def loss(self, batch: Batch) -> Tensor:
        """Return that of the tokens which are learned."""
        return self._sum(batch, _cross_entropy)

    def _sum(self, batch: Batch, measure: Measure) -> Tensor:
        inputs, targets = (torch.from_numpy(ids).to(self.processes.device) for ids in batch)
        with self.precision():
            total: Tensor = self.module(inputs, targets=targets, measure=measure)
        return total

    def evaluate(self) -> Evaluation:
        """Measure the first rows that are held out; each process computes its share."""
        batch = self.data.held_out_rows(self.settings.context, self.settings.evaluate_rows)
        processes, total, n_right, n_targets = self.processes, 0.0, 0.0, 0
        share = batch.share(processes.rank, processes.size)
        for start in range(0, len(share.inputs), self.n_rows):
            part = Batch(*(ids[start : start + self.n_rows] for ids in share))
            loss, right = self._sum(part, _loss_and_right).tolist()
            total, n_right = total + loss, n_right + right
            n_targets += part.n_targets
        total, n_right, n = (processes.reduce(value) for value in (total, n_right, n_targets))
        return Evaluation(total / n, n_right / n)

    def sample(self, step: int) -> tuple[str, str]:
        """Return the start of the held-out text and a decoder's sampled continuation of it."""
        if self.data.masking is not None:
            return "", ""
        longest = self.decoder.config.max_model_len
        n_prompt = self.data.prompt_length or _SAMPLE_PROMPT_TOKENS
        prompt = self.data.held_out[: min(n_prompt, max(1, longest // 2))].tolist()
        n = min(_SAMPLE_TOKENS, longest - len(prompt))
        output = generate(
            self.decoder, prompt, max_tokens=n, temperature=0.8, top_p=0.95, seed=step
        )
        return self.tokenizer.decode(prompt), self.tokenizer.decode(output)


class Ranking(Objective):
    """The cross-entropy of a query's document among all of a batch.

    found: the likeliest of each held-out query, and the right ones, when last measured.
    """

    data: PairData
    found: tuple[Tensor, Tensor] | None = None

    @property
    def row_size(self) -> tuple[int, int]:
        """The tokens of a pair's texts, and their FLOPs."""
        length, n_texts = self.data.mean_length, int(self.data.pairs.shape[1])
        of_text = length * flops_per_token(self.decoder, length, has_logits=False)
        return n_texts * length, n_texts * of_text

    def loss(self, batch: PairBatch) -> Tensor:
        """Return InfoNCE over the batch's documents.

        Every process ranks all of them, because its gradients are those of its own vectors.
        """
        vectors = self.processes.gather_rows(self.vectors(batch))
        loss = _cross_entropy(*self.rank(vectors, batch.texts))
        return loss - loss.detach() * (1 - 1 / self.processes.size)

    def vectors(self, batch: PairBatch) -> Tensor:
        """Return the vectors of this process's pairs, [pairs, columns, d_out]."""
        inputs = (batch.ids, batch.lengths)
        ids, lengths = (torch.from_numpy(array).to(self.processes.device) for array in inputs)
        with self.precision():
            vectors: Tensor = self.module(ids, lengths, pooled=True)
        rows: Tensor = vectors.float().unflatten(0, (-1, batch.texts.shape[1]))
        return rows

    def rank(self, vectors: Tensor, texts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return logits and targets of vectors [pairs, columns, d_out]; texts: see PairBatch."""
        return rank_documents(vectors, texts)

    def evaluate(self) -> Evaluation:
        """Return the loss of batches of held-out pairs, and the share of queries that find theirs.

        Candidates are all documents that are held out. Every process computes everything.
        """
        data, size = self.data, self.settings.batch_size
        pairs = data.pairs[-data.n_held_out_pairs :][: self.settings.evaluate_rows]
        starts = range(0, len(pairs), self.n_rows)
        parts = (data.read(pairs[i : i + self.n_rows], range(self.n_rows)) for i in starts)
        vectors = torch.cat([self.vectors(part) for part in parts])
        total = 0.0
        for start in range(0, len(pairs), size):
            some = slice(start, start + size)
            total += _cross_entropy(*self.rank(vectors[some], pairs[some])).item()
        logits, targets = self.rank(vectors, pairs)
        self.found = logits.argmax(dim=1), targets
        accuracy = (self.found[0] == targets).double().mean().item()
        return Evaluation(total / len(pairs), accuracy)


class Classifying(Ranking):
    """The cross-entropy of a text's label."""

    data: LabelData

    def rank(self, vectors: Tensor, texts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the scores of all labels [texts, labels], and the right ones [texts]."""
        labels = self.data.labels[texts[:, 0]]
        return vectors[:, 0], torch.from_numpy(labels).to(vectors.device)


class Translating(Objective):
    """The cross-entropy of a target's tokens after its source."""

    data: TranslationData

    @property
    def row_size(self) -> tuple[int, int]:
        """The tokens of both sides, and their FLOPs, for their mean lengths."""
        lengths = self.data.lengths.mean(axis=0).round().astype(int).tolist()
        return sum(lengths), flops_per_translation(self.decoder, *lengths)

    def loss(self, batch: TranslationBatch) -> Tensor:
        """Return that of the targets, smoothed as the settings say."""
        measure = partial(_cross_entropy, smoothing=self.settings.label_smoothing)
        return self._run(batch, measure)[0]

    def _run(
        self, batch: TranslationBatch, measure: Measure | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [rows, tokens, vocab], or a sum over them, and targets [rows, tokens]."""
        device = self.processes.device
        sources, lengths, inputs, targets = (torch.from_numpy(ids).to(device) for ids in batch)
        wanted = {} if measure is None else {"targets": targets, "measure": measure}
        with self.precision():
            made = self.module(inputs, lengths, source_ids=sources, **wanted)
        return made.float(), targets

    def evaluate(self) -> Evaluation:
        """Measure the first translations that are held out. Every process computes everything."""
        n = min(self.data.n_held_out_pairs, self.settings.evaluate_rows)
        total, n_right, n_exact, n_targets = 0.0, 0, 0, 0
        for start in range(0, n, self.n_rows):
            batch = self.data.held_out(start, min(n, start + self.n_rows))
            logits, targets = self._run(batch)
            total += _cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
            right, ignored = logits.argmax(dim=-1) == targets, targets == IGNORED
            n_right += int(right.sum())
            n_exact += int((right | ignored).all(dim=1).sum())
            n_targets += batch.n_targets
        return Evaluation(total / n_targets, n_right / n_targets, n_exact / n)

    def sample(self, step: int) -> tuple[str, str]:
        """Return a source that is held out, as a line, and the likeliest target token by token."""
        place, config = step % self.data.n_held_out_pairs, self.decoder.config
        sources, lengths, *_ = self.data.held_out(place, place + 1)
        ids, n_prefix = list(config.target_prefix), len(config.target_prefix)
        for _ in range(min(_SAMPLE_TOKENS, config.max_model_len - n_prefix)):
            batch = TranslationBatch(sources, lengths, np.array([ids]), np.array([ids]))
            ids.append(int(self._run(batch)[0][0, -1].argmax()))
            if ids[-1] in config.eos_token_ids:
                break
        source = self.tokenizer.decode(sources[0].tolist())
        return f"{source}\n", self.tokenizer.decode(ids[n_prefix:])


OBJECTIVES: dict[type, type[Objective]] = {
    TokenData: NextTokens,
    PairData: Ranking,
    LabelData: Classifying,
    TranslationData: Translating,
}


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the sum, in nats; logits: [targets, classes]."""
    return functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


def _loss_and_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, and the number of targets that are the likeliest: [2]."""
    right = (logits.argmax(dim=1) == targets).sum()
    return torch.stack((_cross_entropy(logits, targets), right))
