"""The decoder in float32, a layer at a time: its memory is one layer, and its sums are PyTorch's.

Weights are read when they are needed, in whatever type they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import TransformerConfig
from model.network.attention import LayerCache, StepInputs
from model.network.transformer import Block, Transformer, position_tables
from model.progress import Progress, followed, unheard

_BUDGET = 2e11  # tokens · parameters
_TOKENS = 512  # of short rows, computed together
_WEIGHTS = 2**24  # of the head in float32 at a time

Ids = NDArray[np.int64]
Hear = Callable[[int, LayerCache], None]


def affordable_tokens(n_parameters: int, fewest: int, most: int) -> int:
    """Return how many tokens to compute: seconds of a small model, minutes of a large one."""
    return max(fewest, min(most, int(_BUDGET / n_parameters)))


class LayeredDecoder:
    """`Transformer.forward` of whole rows; weights: by the decoder's names, each read on access."""

    def __init__(
        self, config: TransformerConfig, weights: Mapping[str, Tensor], device: str = "cpu"
    ) -> None:
        self.config = config
        self._weights, self._device = weights, device
        with torch.device("meta"):
            self._decoder = Transformer(config).eval()
        self.n_parameters = self._decoder.n_parameters
        for name, table in position_tables(config).items():
            self._decoder.register_buffer(name, table.to(device), persistent=False)
        for name in ("embedding_norm", "position_embedding", "relative_bias", "norm"):
            if isinstance(module := getattr(self._decoder, name, None), torch.nn.Module):
                self._load(module, name)

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[Ids],
        progress: Progress = unheard,
        stage: str = "computing in PyTorch",
        hear: Hear | None = None,
    ) -> list[Tensor]:
        """Return the last block's output for each row of tokens, [tokens, d_model].

        hear: is called with a layer's number and the keys and values of some of the rows, for all
        rows of a layer and then for the next.
        """
        groups: list[list[int]] = []
        for i, row in enumerate(rows):
            last = groups[-1] if groups else []
            alike = last and len(rows[last[0]]) == len(row)
            if alike and (len(last) + 1) * len(row) <= _TOKENS:
                last.append(i)
            else:
                groups.append([i])
        batches = [torch.from_numpy(np.stack([rows[i] for i in group])) for group in groups]
        table = self._weights["embedding.weight"]  # once: it may be made of rounded ones
        hidden = [self._embed(table, batch) for batch in batches]
        del table
        for layer in followed(range(self.config.n_layer), stage, progress):
            with torch.device("meta"):
                block = Block(self.config, layer).eval()
            self._load(block, f"blocks.{layer}")
            for i, x in enumerate(hidden):
                hidden[i] = self._run_block(block, x, layer, hear)
        return [x for batch in hidden for x in batch]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [tokens, vocab] of last outputs [tokens, d_model]."""
        head = self._head
        bias = self._weights["head.bias"] if self.config.head_bias else None
        normed = self._decoder.norm(hidden)
        logits = torch.empty(len(hidden), self.config.vocab_size, device=self._device)
        step = max(1, _WEIGHTS // self.config.d_model)
        for start in range(0, len(head), step):
            part = self._float(head[start : start + step])
            of = None if bias is None else self._float(bias[start : start + step])
            logits[:, start : start + step] = self._decoder.project(normed, part, of)
        return logits

    @cached_property
    def _head(self) -> Tensor:
        """The head's weights as they are stored, kept because each of many steps needs them."""
        return self._weights["embedding.weight" if self.config.tied_embeddings else "head.weight"]

    def _embed(self, table: Tensor, input_ids: Tensor) -> Tensor:
        """Embed tokens [batch, sequence], over the rows of these tokens alone."""
        used, places = input_ids.unique(return_inverse=True)
        rows = self._float(table[used])
        self._decoder.embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
        place = torch.arange(input_ids.shape[1], device=self._device)
        return self._decoder.embed(places.to(self._device), place[None])

    def _run_block(self, block: Block, x: Tensor, layer: int, hear: Hear | None) -> Tensor:
        batch, sequence, _ = x.shape
        place = torch.arange(sequence, device=self._device)
        positions = self._decoder.positions(place[None], lambda: place)
        if hear is None:
            after: Tensor = block(x, positions)
            return after
        empty = x.new_zeros(batch, self.config.n_kv_head, sequence, self.config.head_dim)
        last = torch.full((batch,), sequence - 1, dtype=torch.int32)
        inputs = StepInputs(last, last.max() + 1, place.expand(batch, -1))
        after, present = block.step(x, positions, inputs, LayerCache(empty, empty))
        hear(layer, present)
        return after

    def _load(self, module: torch.nn.Module, prefix: str) -> None:
        names = module.state_dict()
        tensors = {name: self._float(self._weights[f"{prefix}.{name}"]) for name in names}
        module.load_state_dict(tensors, assign=True)

    def _float(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, torch.float32)
