"""Exported encoder-decoders, run plainly: sources packed, then a token of each text at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir.export.graphs.decoder import export_graph
from kvasir.export.graphs.source import export_source_graph
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ENCODER_GRAPH_FILE, GRAPH_FILE, cache_names
from kvasir.model.onnx.runtime import open_cpu_session
from kvasir.model.packing import SOURCE_OUTPUT, pack

Floats = NDArray[np.float32]


def export_both(
    config: TransformerConfig, weights: Mapping[str, Tensor], folder: Path, precision: str = "fp32"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    export_source_graph(config, weights, folder / ENCODER_GRAPH_FILE, precision)
    export_graph(config, weights, folder / GRAPH_FILE, precision)


class PairSession:
    """Deliberately plain: rows as long as a target can be, copied by every run."""

    def __init__(
        self,
        folder: Path,
        config: TransformerConfig,
        open_session: Callable[[Path], Any] = open_cpu_session,
    ) -> None:
        self._encoder = open_session(folder / ENCODER_GRAPH_FILE)
        self._decoder = open_session(folder / GRAPH_FILE)
        self._config = config
        self._names = cache_names("past_key_values", config.n_layer)
        self._feeds: dict[str, NDArray[Any]] = {}

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Floats]:
        """Return each source's keys and values [tokens, 2 · n_layer, n_kv_head, head_dim]."""
        inputs, ends = pack(sources)
        (made,) = self._encoder.run([SOURCE_OUTPUT], inputs)
        return cast("list[Floats]", np.split(made, ends)[: len(sources)])

    def source_inputs(self, sources: Sequence[Sequence[int]]) -> dict[str, NDArray[Any]]:
        """Return what the decoder reads of sources."""
        encoded, batch = self.encode(sources), len(sources)
        lengths = np.array([len(of) for of in encoded], dtype=np.int32)
        config = self._config
        shape = (2 * config.n_layer, batch, config.n_kv_head, lengths.max(), config.head_dim)
        rows = np.full(shape, np.nan, dtype=np.float32)  # nobody may read beyond a source's end
        for i, of in enumerate(encoded):
            rows[:, i, :, : len(of)] = of.transpose(1, 2, 0, 3)
        names = cache_names("source_key_values", config.n_layer)
        return {
            "source_seqlens_k": lengths - 1,
            "source_total_length": np.array(lengths.max()),
            **dict(zip(names, rows, strict=True)),
        }

    def start(self, sources: Sequence[Sequence[int]]) -> None:
        """Begin a text for each source, all of them in one run."""
        self._feeds = self.source_inputs(sources)
        config, batch = self._config, len(sources)
        empty = np.zeros((batch, config.n_kv_head, config.max_model_len, config.head_dim), "f")
        self._feeds |= dict.fromkeys(self._names, empty)

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Floats:
        """Put a token at a position of each text, and return logits [texts, vocab]."""
        place = np.array(positions)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.array(tokens)[:, None],
            "position_ids": place[:, None],
            "seqlens_k": place.astype(np.int32),
            "total_sequence_length": np.array(place.max() + 1, dtype=np.int32),
            "logits_indices": np.arange(len(tokens)),
        }
        presents = cache_names("present", self._config.n_layer)
        logits, *rows = self._decoder.run(["logits", *presents], inputs | self._feeds)
        self._feeds |= zip(self._names, rows, strict=True)
        return cast("Floats", logits)

    def generate(
        self, sources: Sequence[Sequence[int]], max_tokens: int
    ) -> tuple[list[list[int]], list[Floats]]:
        """Return the likeliest text of each source, its ending included; text i starts i later.

        And the logits [tokens, vocab] that its tokens were taken from.
        """
        self.start(sources)
        prefix, ends = self._config.target_prefix, self._config.eos_token_ids
        texts = [list(prefix) for _ in sources]
        found: list[list[Floats]] = [[] for _ in sources]
        fed = [0] * len(sources)  # the position of each text's next token
        for step in range(len(sources) + len(prefix) + max_tokens):
            logits = self.step([text[at] for text, at in zip(texts, fed, strict=True)], fed)
            for i, text in enumerate(texts):
                full = len(found[i]) == max_tokens or (text[-1] in ends and bool(found[i]))
                if step < i or full:
                    continue
                if fed[i] + 1 == len(text):
                    text.append(int(logits[i].argmax()))
                    found[i].append(logits[i])
                fed[i] += 1
        return [text[len(prefix) :] for text in texts], [np.stack(of) for of in found]
