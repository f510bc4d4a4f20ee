"""Small encoders with random weights, their exported graphs, and texts for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir.export.graphs.encoder import export_encoder_graph
from kvasir.model.config import Pooling
from kvasir.model.configuration.parts import Projection
from kvasir.model.directory import GRAPH_FILE
from kvasir.server.engine.encoder.runner import EncoderRunner
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.sampling.params import Floats, SamplingParams
from tests.kit.random_models import RandomModel, make_config, make_decoder

BERT: dict[str, Any] = {
    "causal": False,
    "position": "learned",
    "norm": "layernorm",
    "norm_placement": "post",
    "embedding_norm": True,
    "n_token_types": 2,
    "n_kv_head": 4,
    "feed_forward": "gelu",
    "qkv_bias": True,
    "output_bias": True,
    "feed_forward_bias": True,
    "pooling": Pooling(kind="mean", normalize=True),
}
# With biases by distance and a classifier; and with windows, gates, and rotary positions.
MPNET = BERT | {
    "position": "learned_relative",
    "n_token_types": None,
    "pooling": Pooling(
        kind="cls",
        projections=(Projection(d_out=24, activation="tanh"), Projection(d_out=3)),
        labels=("a", "b", "c"),
    ),
}
MODERN: dict[str, Any] = {
    "causal": False,
    "norm": "layernorm",
    "norm_bias": False,
    "embedding_norm": True,
    "layers_without_attention_norm": (0,),
    "sliding_window": 4,
    "sliding_window_layers": (1,),
    "sliding_window_rope_theta": 50.0,
    "feed_forward": "geglu",
    "pooling": Pooling(kind="mean", projections=(Projection(d_out=16),), normalize=True),
}
LAST_TOKEN: dict[str, Any] = {"qk_norm": True, "pooling": Pooling(kind="last", normalize=True)}


def export_encoder(folder: Path, precision: str, **changes: Any) -> RandomModel:
    network = make_decoder(make_config(**changes))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GRAPH_FILE
    export_encoder_graph(network.config, network.state_dict(), path, precision)
    return RandomModel(network, path)


def make_text(model: RandomModel, i: int) -> EncoderSequence:
    """Text i: of one token, two, as many as a kernel's block and one, or of any length."""
    generator = np.random.default_rng(i)
    length = [1, 2, 65, *generator.integers(2, 96, size=4).tolist()][i % 7]
    ids = generator.integers(model.config.vocab_size, size=length).tolist()
    types = generator.integers(2, size=length).tolist() if i % 3 == 0 else None
    params = SamplingParams(max_tokens=0)
    return EncoderSequence(i, ids, params, frozenset(), 0.0, type_ids=types)


@torch.inference_mode()
def expected_vectors(model: RandomModel, text: EncoderSequence) -> tuple[Floats, Floats]:
    """Return PyTorch's vectors of a text and of its tokens."""
    ids, lengths = torch.tensor([text.prompt_ids]), torch.tensor([len(text.prompt_ids)])
    has_types = text.type_ids is not None and model.config.n_token_types is not None
    types = torch.tensor([text.type_ids]) if has_types else None
    network = model.decoder
    return network.encode(ids, lengths, types)[0].numpy(), network.hidden(ids, None, types)[
        0
    ].numpy()


def open_runner(model: RandomModel, threads: int = 2, **options: Any) -> EncoderRunner:
    return EncoderRunner(model.graph, model.config, threads=threads, **options)


def of_tokens(text: EncoderSequence) -> EncoderSequence:
    """Return the same text, whose tokens' vectors are wanted."""
    return replace(text, wants_tokens=True)
