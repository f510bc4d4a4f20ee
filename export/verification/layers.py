"""The network in float32 or float64, a layer at a time: its memory is one layer.

Weights are read when they are needed, in whatever type they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import LayerCache
from kvasir.model.network.block import Block
from kvasir.model.network.cross_attention import Source
from kvasir.model.network.run_inputs import StepInputs
from kvasir.model.network.skeleton import make_block, make_target_skeleton
from kvasir.model.platform.machine import return_freed_memory
from kvasir.model.platform.progress import Progress, no_progress, with_progress

_TOKENS = 256  # computed together: of short rows, or of a chunk of a long one
_WEIGHTS = 2**24  # of the head in float32 at a time

Ids = NDArray[np.int64]
# Called with a layer of attention, the number of a row, and its keys and values [n_kv_head, tokens,
# head_dim].
Observer = Callable[[int, int, LayerCache], None]
# Called with a block, and what its parameters' names begin with, to watch what it computes.
Watch = Callable[[torch.nn.Module, str], AbstractContextManager[None]]


class LayeredDecoder:
    """`Transformer.forward` of whole rows; weights: by the decoder's names, each read on access.

    prefix: of the names in the model that it is a part of.
    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        device: str = "cpu",
        prefix: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self._prefix, self._dtype = config, prefix, dtype
        self._weights, self._device = weights, device
        self._decoder = make_target_skeleton(config)
        for name, table in list(self._decoder.named_buffers()):
            in_dtype = table.to(dtype) if table.is_floating_point() else table
            setattr(self._decoder, name, in_dtype.to(device))
        for name in ("embedding_norm", "position_embedding", "relative_bias", "norm"):
            if isinstance(module := getattr(self._decoder, name, None), torch.nn.Module):
                self._load(module, name)

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[Ids],
        progress: Progress = no_progress,
        observe: Observer | None = None,
        sources: Sequence[Tensor] = (),
        *,
        watch: Watch | None = None,
        watched: Container[int] | None = None,
    ) -> list[Tensor]:
        """Return the last block's output for each row of tokens, [tokens, d_model].

        observe: is called for each row of a decoder's layer, and then for those of the next.
        sources: of a decoder with an encoder, the vectors of each row's, as `encode` returns them.
        watch: is entered while a layer computes the rows of `watched`, of which None is all.
        """

        def kind(i: int) -> tuple[int, bool]:
            return len(rows[i]), watched is None or i in watched

        groups: list[list[int]] = []
        for (length, _), places in groupby(range(len(rows)), kind):
            alike, size = list(places), max(1, _TOKENS // length)
            groups += [alike[i : i + size] for i in range(0, len(alike), size)]
        batches = [torch.from_numpy(np.stack([rows[i] for i in group])) for group in groups]
        table = self._weights["embedding.weight"]  # once: it may be made of rounded ones
        hidden = [self._embed(table, batch) for batch in batches]
        del table
        given: list[Source | None] = [None] * len(groups)
        if sources:
            parts = ([sources[i] for i in group] for group in groups)
            given = [
                Source(pad_sequence(part, batch_first=True), torch.tensor(list(map(len, part))))
                for part in parts
            ]
        for layer in with_progress(range(self.config.n_layer), "computing in PyTorch", progress):
            block = make_block(self.config, layer)
            self._load(block, f"blocks.{layer}")
            for i, group in enumerate(groups):
                _, is_watched = kind(group[0])
                name = f"{self._prefix}blocks.{layer}."
                with watch(block, name) if watch and is_watched else nullcontext():
                    hidden[i], cache = self._compute(block, hidden[i], given[i])
                if observe is not None and cache is not None:
                    for place, key, value in zip(group, *cache, strict=True):
                        observe(layer, place, LayerCache(key, value))
            return_freed_memory()  # pieces of a layer's, between which lies what is kept of it
        return [x for batch in hidden for x in batch]

    @torch.inference_mode()
    def states(self, x: Ids | Tensor, first: int = 0) -> Iterator[Tensor]:
        """Yield a row's vectors [tokens, d_model] before layer `first`, and after each from it on.

        x: tokens, or the vectors before layer `first`.
        """
        if not isinstance(x, Tensor):
            x = self._embed(self._weights["embedding.weight"], torch.from_numpy(x)[None])[0]
        yield x
        for layer in range(first, self.config.n_layer):
            block = make_block(self.config, layer)
            self._load(block, f"blocks.{layer}")
            x = self._compute(block, x[None], None)[0][0]
            yield x

    @torch.inference_mode()
    def changes(
        self, row: Ids, change: Callable[[str, Tensor], Tensor | None], progress: Progress
    ) -> dict[str, float]:
        """Return how far the change of each matrix moves a row's vectors after its layer.

        change: returns what takes a matrix's place, or None to leave it. Distances are squares, and
        relative to the vectors: the mean of all tokens.
        """
        x = self._embed(self._weights["embedding.weight"], torch.from_numpy(row)[None])
        moves = dict[str, float]()
        for layer in with_progress(range(self.config.n_layer), "measuring 4 bits", progress):
            block = make_block(self.config, layer)
            self._load(block, f"blocks.{layer}")
            after = self._compute(block, x, None)[0]
            sizes = after.square().sum(dim=-1).clamp(min=torch.finfo(self._dtype).tiny)
            for part, module in block.named_modules():
                name = f"blocks.{layer}.{part}.weight"
                if not isinstance(module, torch.nn.Linear):
                    continue
                exact = module.weight.data
                if (changed := change(name, exact)) is not None:
                    module.weight.data = changed
                    moved = self._compute(block, x, None)[0] - after
                    module.weight.data = exact
                    moves[name] = (moved.square().sum(dim=-1) / sizes).mean().item()
            x = after
        return moves

    @torch.inference_mode()
    def encode(
        self, rows: Sequence[Ids], progress: Progress = no_progress, watch: Watch | None = None
    ) -> list[Tensor]:
        """Return the vectors of each row's tokens after the last norm, [tokens, d_model]."""
        return [self.normed(hidden) for hidden in self.run(rows, progress, watch=watch)]

    def watched_norm(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch what `normed` computes."""
        return watch(self._decoder.norm, "norm.")

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Return what the head reads of last outputs [tokens, d_model]."""
        normed: Tensor = self._decoder.norm(hidden)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [tokens, vocab] of last outputs [tokens, d_model]."""
        head = self._head
        bias = self._weights["head.bias"] if self.config.head_bias else None
        normed = self.normed(hidden)
        shape = len(hidden), self.config.vocab_size
        logits = torch.empty(shape, dtype=self._dtype, device=self._device)
        step = max(1, _WEIGHTS // self.config.d_model)
        for start in range(0, len(head), step):
            rows = slice(start, start + step)
            weight = self._float(head[rows])
            logits[:, rows] = self._decoder.project(
                normed, weight, None if bias is None else self._float(bias[rows])
            )
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

    def _compute(
        self, block: Block, x: Tensor, source: Source | None
    ) -> tuple[Tensor, LayerCache | None]:
        """Run x [batch, sequence, d_model]; a decoder's in chunks: scores are [chunk, sequence]."""
        if source is not None or not self.config.causal:
            in_row = torch.arange(x.shape[1], device=self._device)
            return block(x, self._decoder.positions(in_row[None], in_row.clone), source), None
        batch, sequence, _ = x.shape
        cache, outputs = block.empty_cache(x, sequence), list[Tensor]()
        with torch.device(self._device):
            for chunk in x.split(max(1, _TOKENS // batch), dim=1):
                start = sum(output.shape[1] for output in outputs)
                place = torch.arange(start, start + chunk.shape[1])
                last = place[-1].int()
                n_new = last.long().new_full((batch,), chunk.shape[1])
                inputs = StepInputs(last.expand(batch), last + 1, place.expand(batch, -1), n_new)
                positions = self._decoder.positions(place[None], lambda: torch.arange(sequence))
                output, cache = block.step(chunk, positions, inputs, cache)
                outputs.append(output)
        return torch.cat(outputs, dim=1), LayerCache(*cache[:2]) if block.attends else None

    def _load(self, module: torch.nn.Module, prefix: str) -> None:
        names = module.state_dict()
        tensors = {name: self._float(self._weights[f"{prefix}.{name}"]) for name in names}
        module.load_state_dict(tensors, assign=True)

    def _float(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)
