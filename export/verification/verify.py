"""ONNX Runtime against PyTorch, in every way the server runs the graph: the manifest's figures.

Both compute a layer at a time over the same given tokens; on a GPU the graph runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.export.graphs.source import encoder_weights
from kvasir.export.rounding.activations import Activations
from kvasir.export.verification.layers import Ids, LayeredDecoder, Observer
from kvasir.export.verification.pair_plan import PairPlan, SamplePairs
from kvasir.export.verification.plan import Plan, SampleText
from kvasir.export.verification.segments import Case, Floats, SegmentedGraph
from kvasir.export.verification.tally import NO_LABEL, SPAN, Tally, divergences
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import Device
from kvasir.model.network.attention import LayerCache
from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.records import LayerFigures, Verification

MAX_LOGIT_ERROR = 1e-3  # fp32, relative to the standard deviation of the logits
MOST_OF_NOISE = 4.0  # times float32's own error, where that is larger: kernels sum in other orders
MAX_KL = {"bf16": 0.01, "fp16": 0.01, "int8": 0.01, "int4": 0.2}  # nats, mean
_MOST_DOUBT = 0.05  # of a perplexity loss that was measured on few tokens
MAX_PERPLEXITY_LOSS = {"bf16": 0.01, "fp16": 0.01, "int8": 0.01, "int4": 0.05}  # relative
MAX_EXACT_LOSS = 0.005  # of the share of pairs whose target is the greedy answer
MAX_ERROR_GROWTH = 2.0  # of rounded precisions, in long rows
_LOGITS = 2**24  # numbers at a time, in PyTorch and in ONNX Runtime each

_RANDOM = SampleText("random tokens", np.empty(0, dtype=np.int64))

# Runs an exported graph; yields the logits [wanted, vocab] of each step of all cases.
Run = Callable[[Sequence[Case], Progress], Iterator[Floats]]


class VerificationError(Exception):
    """An exported graph that differs from PyTorch; the message has the figure and its limit."""


class Verifier:
    """A comparison of an exported graph with its decoder; weights: of `LayeredDecoder`."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        text: SampleText | SamplePairs | None = None,
        device: Device = "cpu",
        calibration: SampleText | None = None,
        *,
        calibrates: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        in_torch = "cuda" if device == "cuda" and torch.cuda.is_available() else "cpu"
        self._sample, self._encoder = text, None
        self._calibrates_on = (calibration or text or _RANDOM).name
        self._plan: Plan | PairPlan
        if isinstance(text, SamplePairs):
            assert config.encoder is not None
            self._plan = PairPlan(config, text)
            of_encoder = encoder_weights(config, weights)
            self._encoder = LayeredDecoder(
                config.encoder, of_encoder, prefix="encoder.", dtype=dtype
            )
        else:
            self._plan = Plan(config, text, calibration, calibrates=calibrates)
        self._decoder = LayeredDecoder(config, weights, in_torch, dtype=dtype)
        self._in_float64 = partial(Verifier, config, weights, text, device, dtype=torch.float64)
        self._hidden: list[Tensor] = []  # the last block's output for each row

    def compute(
        self,
        progress: Progress = no_progress,
        observe: Observer | None = None,
        activations: Activations | None = None,
    ) -> None:
        """Compute all rows in PyTorch.

        activations: of the rows that weights are rounded by. observe: is called for these, and for
        the long rows of a decoder without an encoder.
        """
        watch = None if activations is None else activations.watch
        plan, rows = self._plan, [row[:-1] for row in self._plan.rows]
        calibrated, observed = plan.calibrated, {*plan.calibrated, *plan.long_rows}

        def observe_some(layer: int, row: int, cache: LayerCache) -> None:
            if observe is not None and row in observed:
                observe(layer, row, cache)

        sources = list[Tensor]()
        if self._encoder is not None:
            sources = self._encoder.encode(plan.sources, progress, watch)
        self._hidden = self._decoder.run(
            rows, progress, observe_some, sources, watch=watch, watched=calibrated
        )
        if activations is not None:
            described = [*plan.sources, *(rows[row] for row in calibrated)]
            activations.describe(self._calibrates_on, described)
            tied = self._decoder.config.tied_embeddings
            head = "embedding.weight" if tied else "head.weight"
            with self._decoder.watched_norm(activations.watch):
                for row in calibrated:
                    activations.add(head, self._decoder.normed(self._hidden[row]))

    @property
    def calibration_row(self) -> Ids:
        """The first of the rows that weights are rounded by."""
        return self._plan.rows[self._plan.calibrated[0]][:-1]

    def float32_error(self, progress: Progress = no_progress) -> float:
        """Return how far PyTorch's logits are from those in float64, as `max_logit_error`."""
        exact = self._in_float64()
        exact.compute(progress)
        largest, deviation = 0.0, 0.0
        # Rows that weights are rounded by come last, and only here.
        for hidden, in_float64 in zip(self._hidden, exact._hidden, strict=False):
            for some, same in zip(hidden.split(SPAN), in_float64.split(SPAN), strict=True):
                logits = exact._decoder.logits(same)
                error = (self._decoder.logits(some) - logits).abs().max().item()
                largest = float(np.maximum(largest, error))
                deviation = max(deviation, logits.std().item())
        return largest / deviation if deviation else 0.0

    def by_layer(self, graph: SegmentedGraph) -> list[LayerFigures]:
        """Measure each layer alone, on a row of text. Raises ValueError as `layers_alone`."""
        row, decoder = self._plan.rows[self._plan.tests[-1].places[0]][:-1][:SPAN], self._decoder
        exact, figures = list(decoder.states(row)), list[LayerFigures]()
        logits, before = decoder.logits(exact[-1]), torch.zeros_like(exact[0])
        alone = graph.layers_alone(row, [vectors.numpy() for vectors in exact])
        for i, (after, vectors) in enumerate(zip(exact, alone, strict=True)):
            made = torch.from_numpy(vectors)
            *_, last = decoder.states(made, i)
            added, wanted = made - before, after - before
            figures.append(
                LayerFigures.model_construct(
                    layer=f"layer {i - 1}" if i else "embedding",
                    mean_kl=divergences(logits, decoder.logits(last)).mean().item(),
                    error=((added - wanted).norm() / wanted.norm()).item(),
                    gain=((added * wanted).sum() / wanted.square().sum()).item(),
                )
            )
            before = after
        return figures

    def verify(self, run: Run, progress: Progress = no_progress) -> Verification:
        """Measure everything; see `Verification` for the figures' meaning."""
        if not self._hidden:
            self.compute(progress)
        tests, rows = self._plan.tests, self._plan.rows
        runs = [(test, step) for test in tests for step in test.case.steps]
        results = run([test.case for test in tests], progress)
        tally, logits = Tally(), list[Tensor]()
        wanted = list[tuple[int, int]]()  # rows and positions
        labels, spans = list[int](), list[tuple[bool, int]]()
        for done, ((test, step), of_step) in enumerate(zip(runs, results, strict=True), 1):
            places = test.wanted(step)
            wanted += places
            labelled = test.for_perplexity
            labels += [int(rows[row][i + 1]) if labelled else NO_LABEL for row, i in places]
            spans += [(step.decode, i // SPAN) for _, i in places]
            logits.append(torch.from_numpy(of_step))
            # Many tokens at a time, for each of which the head's weights are converted.
            if len(wanted) * self._decoder.config.vocab_size >= _LOGITS or done == len(runs):
                hidden = torch.stack([self._hidden[row][position] for row, position in wanted])
                expected = self._decoder.logits(hidden).cpu()
                tally.add(expected, torch.cat(logits), torch.tensor(labels), spans, wanted)
                for pending in (wanted, labels, spans, logits):
                    pending.clear()
            progress("comparing logits", done, len(runs))
        figures: dict[str, Any] = tally.figures() | {"longest": self._plan.longest}
        if self._plan.text is not None:
            figures["text"] = self._plan.text
        if isinstance(self._sample, SamplePairs) and self._sample.are_translations:
            figures |= tally.exact_matches()
        # Not validated: `check` refuses a figure that is no number.
        return Verification.model_construct(**figures)


def check(verification: Verification, precision: str, float32_error: float = 0.0) -> None:
    """Raise VerificationError over a limit: on logits for fp32, else on what rounding costs.

    float32_error: what PyTorch's own logits differ by from those in float64.
    """
    doubt = 0.0  # two standard errors, since a large model is measured on few tokens
    if precision == "fp32" or np.isnan(verification.max_logit_error):
        error = verification.max_logit_error
        limit = max(MAX_LOGIT_ERROR, MOST_OF_NOISE * float32_error)
        what = "logits differ from PyTorch's, relative to their standard deviation,"
    elif verification.mean_kl is not None and not verification.mean_kl <= MAX_KL[precision]:
        error, limit = verification.mean_kl, MAX_KL[precision]
        what = "next tokens diverge from PyTorch's (mean KL, in nats)"
    else:
        in_torch, in_onnx = verification.perplexity_torch, verification.perplexity_onnx
        assert in_torch is not None
        assert in_onnx is not None
        error, limit = in_onnx / in_torch - 1.0, MAX_PERPLEXITY_LOSS[precision]
        what = "perplexity is above PyTorch's"
        doubt = 2.0 * (verification.perplexity_error or 0.0)
    if not error - min(doubt, _MOST_DOUBT) <= limit:  # a NaN fails too
        raise VerificationError(
            f"the graph's {what} by {error:.2e}, more than {limit:.0e}; it must not be served"
        )
    matches = verification.exact_match_torch or 0.0, verification.exact_match_onnx or 0.0
    doubt = 2.0 * (verification.exact_match_error or 0.0)
    if matches[0] - matches[1] - min(doubt, _MOST_DOUBT) > MAX_EXACT_LOSS:
        raise VerificationError(
            f"the graph answers {matches[1]:.1%} of {verification.text} exactly, and PyTorch "
            f"{matches[0]:.1%}; it must not be served"
        )
    growth = verification.error_growth or 0.0
    if precision != "fp32" and not growth <= MAX_ERROR_GROWTH:
        raise VerificationError(
            f"in rows of {verification.longest} tokens, the graph's errors grow to {growth:.1f} "
            f"times those at the beginning, more than {MAX_ERROR_GROWTH:.0f} times; it must not be "
            "served"
        )
