"""The network: embeddings, blocks, heads. Written once; trained, exported and verified here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvasir.model.config import TransformerConfig
from kvasir.model.network.attention import LayerCache
from kvasir.model.network.block import Block, Cache
from kvasir.model.network.cross_attention import Source, SourceRows
from kvasir.model.network.feed_forward import ExpertLinear
from kvasir.model.network.gradients import Measure, summed
from kvasir.model.network.latent_attention import HeadLinear
from kvasir.model.network.norm import make_norm
from kvasir.model.network.pooling import Pooler, Projector
from kvasir.model.network.positions import (
    Positions,
    RotaryTable,
    alibi_table,
    distances,
    query_scale_table,
    relative_buckets,
    rotary_table,
    sinusoidal_table,
)
from kvasir.model.network.run_inputs import CachedInputs


def position_tables(config: TransformerConfig) -> dict[str, Tensor]:
    """Return the network's constants about positions, by the names of its buffers."""
    if config.position == "sinusoidal":
        return {"sinusoids": sinusoidal_table(config)}
    if config.position == "alibi":
        return {"alibi": alibi_table(config)}
    if config.has_relative_bias:
        return {"buckets": relative_buckets(config)}
    if config.position == "rotary":
        tables = dict(zip(("rotary_cos", "rotary_sin"), rotary_table(config), strict=True))
        if config.sliding_window_rope_theta is not None:
            in_windows = rotary_table(config, in_windows=True)
            tables |= zip(("window_cos", "window_sin"), in_windows, strict=True)
        if (query_scales := query_scale_table(config)) is not None:
            tables["query_scales"] = query_scales
        return tables
    return {}


class _HeadBias(nn.Module):
    """The bias of a head whose matrix is the embedding's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))


def _make_head(config: TransformerConfig) -> nn.Linear | _HeadBias | None:
    """Make what the logits need beside the embedding."""
    if not config.tied_embeddings:
        return nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
    return _HeadBias(config) if config.head_bias else None


class Transformer(nn.Module):
    """Token ids to logits, or to a vector of each text where there is a pooling.

    Weights start as in GPT-2, with narrower projections. embedding: another network's, which this
    one uses as its own.
    """

    sinusoids: Tensor
    alibi: Tensor
    buckets: Tensor
    rotary_cos: Tensor
    rotary_sin: Tensor
    window_cos: Tensor
    window_sin: Tensor
    query_scales: Tensor

    def __init__(self, config: TransformerConfig, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.config = config
        if embedding is None:
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        # A module in a tuple is no child.
        self._borrowed = () if embedding is None else (embedding,)
        self.encoder = None
        if config.encoder is not None:
            own = self.embedding if config.shared_embedding else None
            self.encoder = Transformer(config.encoder, own)
        if config.n_token_types is not None:
            self.token_type_embedding = nn.Embedding(config.n_token_types, config.d_model)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.Identity() if config.norm_placement == "post" else make_norm(config)
        if config.head_projection is not None:
            projector = Projector(config.d_model, config.head_projection, config)
            self.norm = nn.Sequential(self.norm, projector)
        self.dropout = nn.Dropout(config.dropout)
        self.head = _make_head(config)
        self.pooler = None if config.pooling is None else Pooler(config, config.pooling)
        if config.has_learned_positions:
            self.position_embedding = nn.Embedding(config.max_model_len, config.d_model)
        if config.has_relative_bias:
            self.relative_bias = nn.Embedding(config.relative_buckets, config.n_head)
        for name, table in position_tables(config).items():
            self.register_buffer(name, table, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear | HeadLinear):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear | ExpertLinear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        std = 0.02 / math.sqrt(2 * config.n_layer)
        for name, weight in self.blocks.named_parameters():
            if name.endswith((".output.weight", "down.weight")):
                nn.init.normal_(weight, std=std)

    @property
    def n_parameters(self) -> int:
        """The number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor | None = None,
        source: Source | None = None,
        *,
        source_ids: Tensor | None = None,
        pooled: bool = False,
        targets: Tensor | None = None,
        measure: Measure | None = None,
    ) -> Tensor:
        """Return logits [batch, sequence, vocab] of whole sequences; also serving's oracle.

        source: of each row, which a decoder with an encoder needs; or source_ids [batch, n_source],
        whose `lengths` are then given. pooled: return the texts' vectors instead, as `encode` does.
        targets, measure: return the sum of this measure of logits and targets [batch, sequence]
        instead, for which all logits never exist at once.
        """
        if pooled and lengths is not None:
            return self.encode(input_ids, lengths)
        if source_ids is not None and lengths is not None:
            hidden = self.hidden(input_ids, source=self.read(source_ids, lengths))
        else:
            hidden = self.hidden(input_ids, lengths, source=source)
        if measure is None or targets is None:
            return self._logits(hidden)
        of_head = [self.embedding.weight] if self.config.tied_embeddings else []
        of_head += [] if self.head is None else self.head.parameters()
        trained = [parameter for parameter in of_head if parameter.requires_grad]
        flat = hidden.flatten(0, 1)
        return summed(self._logits, measure, targets.flatten(), flat, trained)

    def read(self, source_ids: Tensor, lengths: Tensor) -> Source:
        """Encode sources [batch, n_source] of `lengths` [batch], after which rows are padded."""
        assert self.encoder is not None, "a model without an encoder has no sources"
        return Source(self.encoder.hidden(source_ids, lengths), lengths)

    def encode(
        self, input_ids: Tensor, lengths: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the vector of each text, [batch, d_out]; see `hidden`."""
        assert self.pooler is not None, "a model without pooling has logits only"
        pooled: Tensor = self.pooler(self.hidden(input_ids, lengths, token_type_ids), lengths)
        return pooled

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor:
        """Return the vectors of tokens [batch, sequence, d_model] after the last norm.

        lengths: [batch], the tokens of each row, after which it is padded; those of the padding
        have no meaning. token_type_ids: [batch, sequence]; None is all of type 0.
        """
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids, place[None], token_type_ids)
        positions = self.positions(place[None], lambda: place)._replace(lengths=lengths)
        for block in self.blocks:
            x = block(x, positions, source)
        normed: Tensor = self.norm(x)
        return normed

    def step(
        self,
        input_ids: Tensor,
        inputs: CachedInputs,
        logits_indices: Tensor,
        caches: Sequence[Cache],
        sources: Sequence[SourceRows] = (),
    ) -> tuple[Tensor, list[Cache]]:
        """Run new tokens over cached keys and values and states, as the serving graph does.

        input_ids: [batch, sequence] over rows, or [tokens] over blocks. logits_indices: int64
        [rows], the tokens that want logits. sources: of each layer of a decoder with an encoder.
        Returns logits [rows, vocab] and the caches after the new tokens.
        """
        x = self.embed(input_ids, inputs.position_ids)
        of_attention = (
            LayerCache(*cache[:2])
            for block, cache in zip(self.blocks, caches, strict=True)
            if isinstance(block, Block) and block.attends
        )
        positions = self.positions(
            inputs.position_ids, lambda: inputs.key_positions(next(of_attention))
        )
        presents = []
        given: Sequence[SourceRows | None] = sources or [None] * len(caches)
        for block, cache, source in zip(self.blocks, caches, given, strict=True):
            assert isinstance(block, Block)
            x, present = block.step(x, positions, inputs, cache, source)
            presents.append(present)
        asked = functional.embedding(logits_indices, x.flatten(0, -2))
        return self._logits(self.norm(asked)), presents

    def positions(self, of_queries: Tensor, of_keys: Callable[[], Tensor]) -> Positions:
        """Return what attention has to know of positions.

        of_queries: [batch, sequence]. of_keys: returns [n_keys]; it is called for biases only.
        """
        if self.config.position == "rotary":
            windowed = hasattr(self, "window_cos")
            own = RotaryTable(self.window_cos, self.window_sin) if windowed else None
            scale = self.query_scales[of_queries] if hasattr(self, "query_scales") else None
            rotary = RotaryTable(self.rotary_cos, self.rotary_sin)
            of_tokens = None
            if self.config.turns_outside:
                of_tokens = RotaryTable(*(part[of_queries] for part in rotary))
            return Positions(rotary, rotary_in_windows=own, query_scale=scale, of_tokens=of_tokens)
        if self.config.position != "alibi" and not self.config.has_relative_bias:
            return Positions()
        apart = distances(of_queries, of_keys())
        reach = apart.clamp(min=0) if self.config.causal else apart.abs()
        if self.config.position == "alibi":
            return Positions(bias=self.alibi[:, reach].transpose(0, 1))
        buckets = self.buckets[reach]
        if not self.config.causal:
            buckets = buckets + (apart < 0) * (self.config.relative_buckets // 2)
        learned = self.relative_bias(buckets)  # [batch, sequence, n_keys, n_head]
        return Positions(bias=learned.permute(0, 3, 1, 2))

    def embed(
        self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the first block's input [..., d_model]; without type ids all are of type 0."""
        embedding = self._borrowed[0] if self._borrowed else self.embedding
        x: Tensor = embedding(input_ids)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.config.has_learned_positions:
            x = x + self.position_embedding(position_ids)
        elif self.config.position == "sinusoidal":
            x = x * math.sqrt(self.config.d_model) + self.sinusoids[position_ids]
        if self.config.n_token_types is not None:
            types = self.token_type_embedding
            x = x + (types.weight[0] if token_type_ids is None else types(token_type_ids))
        dropped: Tensor = self.dropout(self.embedding_norm(x))
        return dropped

    def _logits(self, normed: Tensor) -> Tensor:
        weight = self.head.weight if isinstance(self.head, nn.Linear) else self.embedding.weight
        bias = None if self.head is None else self.head.bias
        return self.project(normed, weight, bias)

    def project(self, normed: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the logits of tokens that have these rows [tokens, d_model] in the head."""
        logits = functional.linear(normed, weight)
        if bias is not None:
            logits = logits + bias
        if cap := self.config.logit_softcap:
            logits = cap * (logits / cap).tanh()
        return logits
