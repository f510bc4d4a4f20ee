"""Small decoders with random weights, and their exported graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export.graph import export_graph
from model.bundle import GRAPH_FILE
from model.config import TransformerConfig
from model.network.transformer import Transformer
from server.engine.runner import OnnxRunner


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A decoder and the graph that was exported from it."""

    decoder: Transformer
    graph: Path

    @property
    def config(self) -> TransformerConfig:
        return self.decoder.config

    def runner(self, **options: Any) -> OnnxRunner:
        options = {"max_num_seqs": 4, "threads": 2, "kv_cache_bytes": 2**26, **options}
        return OnnxRunner(self.graph, self.config, **options)


def make_config(**changes: Any) -> TransformerConfig:
    shape: dict[str, Any] = {
        "vocab_size": 300,
        "max_model_len": 96,
        "n_layer": 2,
        "n_head": 4,
        "n_kv_head": 2,
        "head_dim": 16,
        "d_model": 48,
        "d_ff": 96,
    }
    return TransformerConfig(**{**shape, **changes})


def make_decoder(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Make a decoder whose weights vary enough for attention to matter and errors to show."""
    torch.manual_seed(seed)
    decoder = Transformer(config).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return decoder


def export_random(folder: Path, precision: str = "fp32", **changes: Any) -> RandomModel:
    decoder = make_decoder(make_config(**changes))
    folder.mkdir(parents=True, exist_ok=True)
    export_graph(decoder.config, decoder.state_dict(), folder / GRAPH_FILE, precision)
    return RandomModel(decoder, folder / GRAPH_FILE)
