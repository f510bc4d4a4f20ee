"""A decoder with an encoder on ONNX Runtime on the CPU.

A source is encoded whole, in a packed run of several, which makes the keys and values of every
layer's cross-attention. They are copied to the sequence's row. From then on its target takes part
in the decode run, a token a step: first its given beginning, then new tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.kernels.library import Library
from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import cache_names
from kvasir.model.onnx.runtime import onnxruntime
from kvasir.model.packing import SOURCE_OUTPUT, encode_sources
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.adapters.stock import graph_adapters
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.encoder.engine import MAX_PADDING
from kvasir.server.engine.kv.memory import KVShape
from kvasir.server.engine.kv.source_rows import SourceRows
from kvasir.server.engine.model_runner import check_max_model_len, group_neighbours, kv_memory
from kvasir.server.engine.row_binding import RowBinding
from kvasir.server.engine.runner import TOKEN_BLOCK, lone_token_differs
from kvasir.server.engine.sampling.logits import Logits
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.session import check_shape, open_session


class _Token(NamedTuple):
    """A row's token, and its place in the target."""

    id: int
    place: int
    adapter: Adapter | None = None


class Seq2SeqRunner:
    """Two sessions, the rows of sources and targets, and the decoder's input buffers.

    encoder, decoder: graphs. The other arguments are OnnxRunner's and EncoderRunner's. Raises
    ValueError for a limit that the model or the machine cannot meet.
    """

    drafts_exactly = False

    def __init__(
        self,
        encoder: Path,
        decoder: Path,
        config: TransformerConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        n_models: int = 1,
        threads: int | None = None,
        fits_16_bits: bool = False,
        library: Library | None = None,
        layout: Layout | None = None,
    ) -> None:
        assert config.encoder is not None
        self.adapters = graph_adapters(layout, library)
        self.max_model_len = check_max_model_len(max_model_len, config)
        longest = config.encoder.max_model_len
        self.max_source_len = min(longest, max_model_len or longest)
        self.vocab_size = config.vocab_size
        self.decode_seconds = 0.0
        threads = threads or usable_cpus()
        how: dict[str, Any] = {"library": library, "adapters": self.adapters}
        self._encoder = open_session(
            encoder,
            threads,
            of_sources=True,
            plans_memory=False,
            fits_16_bits=fits_16_bits,
            **how,
        )
        self._decoder = open_session(decoder, threads, **how)
        check_shape(self._decoder, config)
        shape = KVShape(*config.cache_shape)
        n_bytes = kv_memory(kv_cache_bytes, n_models)
        of_source = shape._replace(n_layer=config.n_source_layer, states=())
        per_token = max(shape.token_bytes(), of_source.token_bytes())
        of_states = shape.state_bytes * (max_num_seqs + 1)  # SourceRows has one row more
        n_tokens, least = (n_bytes - of_states) // per_token, 1 + len(config.target_prefix) + 1
        if n_tokens < least:
            beside = f", and the states of {max_num_seqs} sequences {of_states}"
            raise ValueError(
                f"kv_cache_memory of {n_bytes} bytes holds no source with its target: {least} "
                f"tokens take {least * per_token}{beside if of_states else ''}; raise it, or lower "
                "max_num_seqs"
            )
        self.kv = SourceRows(
            shape,
            of_source,
            max_num_seqs=max_num_seqs,
            max_source_len=self.max_source_len,
            max_model_len=self.max_model_len,
            budget_tokens=min(n_tokens, max_num_seqs * (self.max_source_len + self.max_model_len)),
        )
        # Untouched memory is free.
        self._logits: Floats = np.empty((max(8, max_num_seqs), self.vocab_size), dtype=np.float32)
        self._bindings: dict[int, _SourceBinding] = {}  # by rows
        self._never_alone = False
        self._never_alone = lone_token_differs(self._decode_one, self._logits)
        warmed, of_none = [[0, 0]], self._adapter_inputs([None], np.array([2]))
        encode_sources(self._encoder, warmed, of_none)  # as the trial warms the decoder up
        self.decode_seconds = 0.0

    def run(self, batch: StepBatch) -> Logits:
        """See Runner."""
        n_done = self._decode(batch.decodes) if batch.decodes else 0
        sources = sorted(batch.prefills, key=lambda chunk: chunk.count)
        for chunks in group_neighbours(sources, _are_alike):
            self._encode(chunks)
        return Logits.of(self._logits[:n_done])

    def _encode(self, chunks: list[Chunk]) -> None:
        """Encode whole sources in one run, and write what it makes to their rows."""
        sources = [chunk.sequence.prompt_ids for chunk in chunks]
        adapters = [chunk.sequence.adapter for chunk in chunks]
        of_adapters = self._adapter_inputs(adapters, np.array([*map(len, sources)]))
        made = encode_sources(self._encoder, sources, of_adapters)
        for chunk, (keys_values, states) in zip(chunks, made, strict=True):
            self.kv.sources.array[:, chunk.row, :, : chunk.count] = keys_values
            self.kv.targets.write_states(chunk.row, states)

    def _adapter_inputs(
        self, adapters: list[Adapter | None], lengths: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[Any]]:
        return {} if self.adapters is None else self.adapters.inputs(adapters, lengths)

    def _decode(self, chunks: list[Chunk]) -> int:
        """Run a token of each target; write the logits in the chunks' order, and count them."""
        tokens: dict[int, _Token] = {}  # by row
        wanted: list[int] = []  # rows
        for chunk in chunks:
            sequence, place = chunk.sequence, chunk.start - len(chunk.sequence.prompt_ids)
            token_ids = [sequence.last_token_id]
            if place < len(sequence.target_prefix):
                token_ids = [sequence.target_prefix[place]]
            elif sequence.beams is not None:
                token_ids = [text.token_ids[-1] for text in sequence.beams.running]
                for source, target, start in sequence.beams.take_copies():
                    self.kv.copy(sequence.rows[source], sequence.rows[target], start, place)
            rows = sequence.rows[: len(token_ids)]
            tokens |= {
                row: _Token(token_id, place, sequence.adapter)
                for row, token_id in zip(rows, token_ids, strict=True)
            }
            wanted += rows[: chunk.n_logits]
        return self._run(tokens, wanted, 0)

    def _run(self, tokens: dict[int, _Token], wanted: list[int], first_logit: int) -> int:
        """Run the rows from 0 on; write the logits of those `wanted` from `first_logit` on.

        Other rows get a token that their next one overwrites, and keep their states.
        """
        n_rows = 1 + max(tokens)
        n_rows += self._never_alone and n_rows % TOKEN_BLOCK == 1
        if n_rows not in self._bindings:
            self._bindings[n_rows] = _SourceBinding(self._decoder, self.kv, n_rows)
        binding = self._bindings[n_rows]
        of_rows = [tokens.get(row, _Token(0, 0)) for row in range(n_rows)]
        binding.input_ids[:] = [token.id for token in of_rows]
        binding.position_ids[:] = [token.place for token in of_rows]
        binding.n_new[:] = [row in tokens for row in range(n_rows)]
        binding.take(self._adapter_inputs([token.adapter for token in of_rows]))
        ends = [token.place + 1 for token in of_rows]
        self.decode_seconds += binding.run(ends, 1, wanted, self._logits, first_logit)
        return len(wanted)

    def _decode_one(self, token_id: int, position: int, n_rows: int, first_logit: int) -> None:
        tokens = {0: _Token(token_id, position), 1: _Token(0, 0)}
        self.kv.targets.write_states(0, None)
        self._run({row: tokens[row] for row in range(n_rows)}, [0], first_logit)


def _are_alike(sources: list[Chunk]) -> bool:
    """Return whether sources, by length, may share a run: attention pads them to the longest."""
    n_tokens = sum(source.count for source in sources)
    return sources[-1].count * len(sources) <= MAX_PADDING * n_tokens


class _SourceBinding(RowBinding):
    """The same for `batch` rows of targets from 0 on, beside their sources."""

    def __init__(self, session: onnxruntime.InferenceSession, kv: SourceRows, batch: int) -> None:
        super().__init__(session, kv.targets, 0, batch, capacity=batch)
        self._sources = kv.sources
        self._source_seqlens_k = np.zeros(batch, dtype=np.int32)
        self._source_total = np.zeros((), dtype=np.int32)
        if len(kv.sources.array):
            self._bind_input("source_seqlens_k", self._source_seqlens_k, (batch,))
            self._bind_input("source_total_length", self._source_total, ())
        names = cache_names(SOURCE_OUTPUT, len(kv.sources.array) // 2)
        for name, block in zip(names, kv.sources.array, strict=True):
            self._bind_input(name, block, (batch, *kv.sources.row_shape))

    def run(
        self, ends: list[int], sequence: int, indices: list[int], logits: Floats, first_logit: int
    ) -> float:
        """See RowBinding. The sources are as long as their rows' reservations."""
        lengths = np.maximum(self._sources.reserved[: len(ends)], 1)
        self._source_seqlens_k[:] = lengths - 1
        self._source_total[()] = lengths.max()
        return super().run(ends, sequence, indices, logits, first_logit)
