"""The exported graph in one session: the oracle of the graph a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvasir.export.verification.segments import Case, Floats, Ids, Step
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import CACHE_OUTPUTS, DECODE_INPUT, cache_names
from kvasir.model.onnx.runtime import open_cpu_session


class GraphSession:
    """Deliberately plain: separate past and present arrays, one run at a time."""

    def __init__(
        self,
        path: Path,
        config: TransformerConfig,
        open_session: Callable[[Path], Any] = open_cpu_session,
    ) -> None:
        self._session = open_session(path)
        self._config = config
        self.rounds_cache = any(value.name == DECODE_INPUT for value in self._session.get_inputs())
        self._rows: dict[str, list[NDArray[Any]]] = {}  # by the inputs' name, of CACHE_OUTPUTS

    def clear(self, batch: int, n_positions: int) -> None:
        """Start with `batch` empty rows of `n_positions` positions."""
        shape = (batch, self._config.n_kv_head, n_positions, self._config.head_dim)
        n_blocks, empty = 2 * self._config.n_layer, np.zeros(shape, dtype=np.float32)
        self._rows = {"past_key_values": [empty] * n_blocks}
        if self.rounds_cache:
            self._rows["prompt_key_values"] = self._rows["past_key_values"]
            self._rows["past_key_values"] = [empty.astype(np.int8)] * n_blocks

    def run(self, tokens: Ids, lengths: Sequence[int], *, decode: bool = False) -> Floats:
        """Append tokens [batch, sequence]; row b then holds lengths[b]. Returns logits of all."""
        batch, sequence = tokens.shape
        indices = np.arange(batch * sequence)
        logits = self.run_step(tokens, Step(sequence, lengths, indices.tolist(), decode))
        return logits.reshape(batch, sequence, -1)

    def run_case(self, case: Case) -> list[Floats]:
        """Return the logits of each step."""
        self.clear(*case.rows.shape)
        tokens = (np.take_along_axis(case.rows, step.positions, axis=1) for step in case.steps)
        return [self.run_step(*pair) for pair in zip(tokens, case.steps, strict=True)]

    def run_step(self, tokens: Ids, step: Step) -> Floats:
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": tokens,
            "seqlens_k": np.array(step.lengths, dtype=np.int32) - 1,
            "total_sequence_length": np.array(max(step.lengths), dtype=np.int32),
            "position_ids": step.positions,
            "logits_indices": np.array(step.wanted, dtype=np.int64),
        }
        n_layer = self._config.n_layer
        for name, rows in self._rows.items():
            feeds |= zip(cache_names(name, n_layer), rows, strict=True)
        if self.rounds_cache:
            feeds[DECODE_INPUT] = np.array(step.decode)
        used = "prompt_key_values" if self.rounds_cache and not step.decode else "past_key_values"
        outputs = ["logits", *cache_names(CACHE_OUTPUTS[used], n_layer)]
        logits, *self._rows[used] = self._session.run(outputs, feeds)
        if used == "prompt_key_values":
            rounded = (np.clip(np.rint(rows), -127, 127) for rows in self._rows[used])
            self._rows["past_key_values"] = [rows.astype(np.int8) for rows in rounded]
        return cast("Floats", logits)
