"""Sums over tokens whose logits PyTorch and a graph have computed: what rounding costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kvasir.model.records import SpanFigures

NO_LABEL = -100
_NEAR_TIE = 0.1  # of a position's deviation, between its two likeliest tokens
SPAN = 128  # positions of which errors are added up
_TINY = 1e-30
_SMALL_ERROR = 0.02  # relative, from which growth is counted
_DOUBLES = 2**20  # logits at a time in float64: divergences are small differences

Pair = NDArray[np.float64]


def divergences(expected: Tensor, actual: Tensor) -> Tensor:
    """Return KL(expected || actual) in nats of each token's logits [tokens, vocab].

    Kullback and Leibler, "On Information and Sufficiency", 1951.
    """
    parts, n_tokens = list[Tensor](), max(1, _DOUBLES // expected.shape[1])
    for logits in zip(expected.split(n_tokens), actual.split(n_tokens), strict=True):
        of_expected, of_actual = (part.double().log_softmax(dim=1) for part in logits)
        parts.append((of_expected.exp() * (of_expected - of_actual)).sum(dim=1).clamp(min=0.0))
    return torch.cat(parts)


class Tally:
    """Sums over compared tokens."""

    def __init__(self) -> None:
        self.n_tokens = self.n_equal = self.n_near_ties = self.n_labels = 0
        self.largest_error = 0.0
        self.n_logits, self.sums = 0, np.zeros(2)  # of the reference's logits, and of squares
        self.losses = np.zeros(2)  # in PyTorch and in ONNX Runtime
        self.labelled, self.missed = set[int](), (set[int](), set[int]())  # rows
        self.squares = 0.0  # of the differences between both
        self.divergences, self.differ = list[Tensor](), list[Tensor]()
        self.positions = list[int]()
        # By span: the sum of the tokens' relative errors, and their number. In a mean of squares,
        # one token in a hundred that rounding sends to another expert would outweigh all others.
        self.by_span = defaultdict[tuple[bool, int], Pair](lambda: np.zeros(2))

    def add(
        self,
        expected: Tensor,
        actual: Tensor,
        labels: Tensor,
        spans: Sequence[tuple[bool, int]],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Add logits [tokens, vocab].

        labels: [tokens], each the next token or NO_LABEL. spans: whether each token was decoded,
        and its position // SPAN. places: each token's row, and its position.
        """
        self.n_tokens += len(labels)
        self.positions += [position for _, position in places]
        differ = expected.argmax(dim=1) != actual.argmax(dim=1)
        self.n_equal += int((~differ).sum())
        if differ.any():
            first, second = expected[differ].topk(2, dim=1).values.unbind(dim=1)
            is_near = first - second < _NEAR_TIE * expected[differ].std(dim=1)
            self.n_near_ties += int(is_near.sum())
        self.n_labels += int((labels != NO_LABEL).sum())
        rows, is_label = torch.tensor([row for row, _ in places]), labels != NO_LABEL
        self.labelled.update(rows[is_label].tolist())
        for missed, logits in zip(self.missed, (expected, actual), strict=True):
            missed.update(rows[is_label & (logits.argmax(dim=1) != labels)].tolist())
        variance, mean = (moment.item() for moment in torch.var_mean(expected, correction=0))
        self.n_logits += expected.numel()
        self.sums += expected.numel() * np.array([mean, variance + mean**2])
        losses = torch.stack(
            [
                functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
                for logits in (expected, actual)
            ]
        ).double()
        self.losses += losses.sum(dim=1).numpy()
        self.squares += (losses[1] - losses[0]).square().sum().item()
        self.divergences.append(divergences(expected, actual))
        self.differ.append(differ)
        errors = actual - expected
        error = torch.linalg.vector_norm(errors, torch.inf).item()
        self.largest_error = float(np.maximum(self.largest_error, error))  # max() may pass a NaN
        of_errors, of_logits = (rows.std(dim=1, correction=0) for rows in (errors, expected))
        for span, share in zip(spans, of_errors / of_logits.clamp(min=_TINY), strict=True):
            self.by_span[span] += (share.item(), 1.0)

    def exact_matches(self) -> dict[str, float]:
        """Return the shares of rows all of whose labels are the likeliest tokens.

        These rows are what greedy decoding generates.
        """
        in_torch, in_onnx = (1.0 - len(rows) / len(self.labelled) for rows in self.missed)
        differ = len(self.missed[0] ^ self.missed[1])
        error = math.sqrt(differ) / len(self.labelled)
        return {
            "exact_match_torch": in_torch,
            "exact_match_onnx": in_onnx,
            "exact_match_error": error,
        }

    def by_position(self) -> list[SpanFigures]:
        """Return what rounding costs before position SPAN, before 4 SPAN, 16 SPAN, and so on."""
        positions = torch.tensor(self.positions)
        divergences, differ = torch.cat(self.divergences), torch.cat(self.differ)
        spans, first = list[SpanFigures](), 0
        while first <= max(self.positions):
            end = 4 * first or SPAN
            chosen = (positions >= first) & (positions < end)
            if n_tokens := int(chosen.sum()):
                of_span = divergences[chosen]
                spans.append(
                    SpanFigures.model_construct(
                        first=first,
                        last=min(end - 1, max(self.positions)),
                        tokens=n_tokens,
                        mean_kl=of_span.mean().item(),
                        kl_99=of_span.quantile(0.99).item(),
                        greedy_agreement=1.0 - differ[chosen].double().mean().item(),
                    )
                )
            first = end
        return spans

    def figures(self) -> dict[str, Any]:
        """Return the fields of `Verification`, without the text."""
        mean, square = self.sums / self.n_logits
        deviation = math.sqrt(max(square - mean**2, 0.0)) or math.nan  # where all logits are equal
        divergences = torch.cat(self.divergences)
        figures: dict[str, Any] = {
            "mean_kl": divergences.mean().item(),
            "kl_99": divergences.quantile(0.99).item(),
            "max_logit_error": self.largest_error / deviation,
            "greedy_agreement": self.n_equal / self.n_tokens,
            "near_ties": self.n_near_ties,
            "positions": self.n_tokens,
            "by_position": self.by_position(),
        }
        errors = {span: total / n_tokens for span, (total, n_tokens) in self.by_span.items()}
        growths = [
            error / max(errors[decoded, 0], _SMALL_ERROR)
            for (decoded, span), error in errors.items()
            if span and (decoded, 0) in errors
        ]
        if growths:
            figures["error_growth"] = float(max(growths))
        if self.n_labels:
            in_torch, in_onnx = np.exp(self.losses / self.n_labels).tolist()
            mean = (self.losses[1] - self.losses[0]) / self.n_labels
            variance = max(self.squares / self.n_labels - mean**2, 0.0)
            figures |= {"perplexity_torch": in_torch, "perplexity_onnx": in_onnx}
            figures["perplexity_error"] = math.sqrt(variance / self.n_labels)
        return figures
