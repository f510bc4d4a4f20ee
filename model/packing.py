"""Texts packed for one run of an encoder's graph: its inputs, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Inputs and outputs of the graph. Only a network with token types has the input for them.
TYPES_INPUT = "token_type_ids"
VECTORS_OUTPUT = "vectors"
HIDDEN_OUTPUT = "token_vectors"
# Of the encoder of an encoder-decoder, for each token.
SOURCE_OUTPUT, START_OUTPUT = "source_key_values", "start_states"


def pack(
    texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None] | None = None
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Return the inputs for texts of token ids, and the end of each text among the tokens.

    types: each text's token types, None where all are 0; None for a network without types.
    """
    lengths = np.array([len(text) for text in texts])
    if len(texts) == 1 and lengths[0] > 1:  # a lone text waits for each of the operations below
        places = np.arange(lengths[0])
        inputs = {
            "input_ids": np.array(texts[0], np.int64),
            "position_ids": places,
            "rows": places[None],
            "lengths": lengths,
            "places": places,
        }
        if types is not None:
            of_text = [0] * len(texts[0]) if types[0] is None else types[0]
            inputs[TYPES_INPUT] = np.array(of_text, np.int64)
        return inputs, lengths
    ends = lengths.cumsum()
    starts = ends - lengths
    # A product of one row rounds differently: a lone token runs beside one that nobody reads.
    n_extra = int(ends[-1] == 1)
    n_tokens, width = int(ends[-1]) + n_extra, max(2, int(lengths.max()))
    in_row = np.arange(width)
    places = np.flatnonzero(in_row < lengths[:, None] + n_extra)
    ids = np.zeros(n_tokens, dtype=np.int64)
    ids[: ends[-1]] = np.fromiter(chain.from_iterable(texts), np.int64)
    inputs = {
        "input_ids": ids,
        "position_ids": places % width,
        "rows": starts[:, None] + np.minimum(in_row, lengths[:, None] - 1),
        "lengths": lengths,
        "places": places,
    }
    if types is not None:
        inputs[TYPES_INPUT] = of_tokens = np.zeros(n_tokens, dtype=np.int64)
        for start, end, given in zip(starts, ends, types, strict=True):
            if given is not None:
                of_tokens[start:end] = given
    return inputs, ends


def encode_sources(
    session: Any,
    sources: Sequence[Sequence[int]],
    further_inputs: Mapping[str, NDArray[Any]] | None = None,
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Run an encoder's session; return what the decoder reads of each source.

    That is keys and values [2 · layers, n_kv_head, tokens, head_dim] and the states that recurrent
    layers begin with, one after the other, where there are such.
    """
    inputs, ends = pack(sources)
    names = [value.name for value in session.get_outputs()]
    made = dict(zip(names, session.run(names, {**inputs, **(further_inputs or {})}), strict=True))
    nothing = np.zeros((len(inputs["input_ids"]), 0, 1, 1), dtype=np.float32)
    keys_values, states = made.get(SOURCE_OUTPUT, nothing), made.get(START_OUTPUT, nothing)
    starts = [0, *ends[:-1]]
    return [
        (keys_values[start:end].transpose(1, 2, 0, 3), states[start].ravel())
        for start, end in zip(starts, ends, strict=True)
    ]
