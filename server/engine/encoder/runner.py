"""An encoder on ONNX Runtime on the CPU: texts become one packed run.

Layers compute the tokens of all texts as one matrix, without padding. Attention alone sees a row
for each text, padded on the right. So the texts of a run should be of similar length.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from model.bundle import HIDDEN_OUTPUT, TYPES_INPUT, VECTORS_OUTPUT
from model.config import TransformerConfig
from server.engine.encoder.sequence import EncoderSequence
from server.engine.engine import check_max_model_len
from server.engine.machine import SPIN_MICROSECONDS, usable_cpus
from server.engine.sampling import Floats
from server.engine.session import open_session


class EncoderRunner:
    """One session. Raises ValueError for a limit that the model cannot meet."""

    def __init__(
        self,
        graph: Path,
        config: TransformerConfig,
        *,
        max_model_len: int | None = None,
        threads: int | None = None,
        spin_microseconds: int = SPIN_MICROSECONDS,
    ) -> None:
        self.max_model_len = check_max_model_len(max_model_len, config)
        self._session = open_session(graph, threads or usable_cpus(), spin_microseconds)
        self._has_types = config.n_token_types is not None

    def run(self, texts: list[EncoderSequence]) -> list[Floats]:
        """Return each text's vector [d_out] or, if it wants them, its tokens' [tokens, d_model]."""
        lengths = np.array([len(text.prompt_ids) for text in texts])
        ends = lengths.cumsum()
        starts = ends - lengths
        # A product of one row rounds differently: a lone token runs beside one that nobody reads.
        n_extra = int(ends[-1] == 1)
        n_tokens, width = int(ends[-1]) + n_extra, max(2, int(lengths.max()))
        in_row = np.arange(width)
        places = np.flatnonzero(in_row < lengths[:, None] + n_extra)
        ids = np.zeros(n_tokens, dtype=np.int64)
        ids[: ends[-1]] = np.fromiter(chain.from_iterable(t.prompt_ids for t in texts), np.int64)
        inputs = {
            "input_ids": ids,
            "position_ids": places % width,
            "rows": starts[:, None] + np.minimum(in_row, lengths[:, None] - 1),
            "lengths": lengths,
            "places": places,
        }
        if self._has_types:
            types = inputs[TYPES_INPUT] = np.zeros(n_tokens, dtype=np.int64)
            for text, start, end in zip(texts, starts, ends, strict=True):
                if text.type_ids is not None:
                    types[start:end] = text.type_ids
        names = [VECTORS_OUTPUT]
        if any(text.wants_tokens for text in texts):
            names.append(HIDDEN_OUTPUT)
        vectors, *of_tokens = self._session.run(names, inputs)
        return [
            of_tokens[0][starts[i] : ends[i]] if text.wants_tokens else vectors[i]
            for i, text in enumerate(texts)
        ]
