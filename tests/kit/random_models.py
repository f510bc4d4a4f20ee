"""Small decoders with random weights, and their exported graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.export.graphs.decoder import export_graph
from kvasir.export.rounding.kv_cache import KVScales
from kvasir.export.verification.layers import LayeredDecoder
from kvasir.export.verification.plan import SampleText
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.verify import Verifier
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import GRAPH_FILE
from kvasir.model.network.transformer import Transformer
from kvasir.model.records import Verification
from kvasir.server.engine.runner import OnnxRunner


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A decoder and the graph that was exported from it."""

    decoder: Transformer
    graph: Path

    @property
    def config(self) -> TransformerConfig:
        return self.decoder.config

    def verify(self, text: SampleText | None = None) -> Verification:
        verifier = Verifier(self.config, self.decoder.state_dict(), text)
        return verifier.verify(SegmentedGraph(self.graph, self.config).logits)

    def runner(self, **options: Any) -> OnnxRunner:
        options = {"max_num_seqs": 4, "threads": 2, "kv_cache_bytes": 2**26, **options}
        return OnnxRunner(self.graph, self.config, **options)


SHAPE: dict[str, Any] = {"vocab_size": 300, "max_model_len": 96, "n_layer": 2, "n_head": 4}
SHAPE |= {"n_kv_head": 2, "head_dim": 16, "d_model": 48, "d_ff": 96}


def make_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**SHAPE | changes)


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


def measure_scales(
    decoder: Transformer, ids: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Return the scales of the keys and values of tokens [rows, sequence], or of random ones."""
    config = decoder.config
    if ids is None:
        shape = (8, min(512, config.max_model_len))
        ids = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    scales = KVScales(config)
    LayeredDecoder(config, decoder.state_dict()).run(list(ids), observe=scales.observe)
    return scales.steps()


def export_random(folder: Path, precision: str = "fp32", **changes: Any) -> RandomModel:
    return export_decoder(make_decoder(make_config(**changes)), folder, precision)


def export_decoder(decoder: Transformer, folder: Path, precision: str = "fp32") -> RandomModel:
    folder.mkdir(parents=True, exist_ok=True)
    model = RandomModel(decoder, folder / GRAPH_FILE)
    scales = measure_scales(decoder)
    export_graph(model.config, decoder.state_dict(), model.graph, precision, scales)
    return model
