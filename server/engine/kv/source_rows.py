"""KV cache rows of encoder-decoders: of sources, and of their targets."""

from __future__ import annotations

from kvasir.server.engine.kv.memory import KVShape, RowMemory
from kvasir.server.engine.kv.prefix_cache import PrefixCache
from kvasir.server.engine.kv.rows import RowStore


class SourceRows(RowStore):
    """Rows of a source and, in the same row of another memory, its target, for encoder-decoders.

    of_source: the shape of what the decoder reads of sources, as `shape` that of targets. A token
    of either takes as much of the budget. No prompt is looked up: a source's tokens attend to those
    after them, so a common beginning has no common keys.
    """

    def __init__(
        self,
        shape: KVShape,
        of_source: KVShape,
        *,
        max_num_seqs: int,
        max_source_len: int,
        max_model_len: int,
        budget_tokens: int,
    ) -> None:
        # One row more, which no sequence gets: a decode run may need a row beside the last.
        self.sources = RowMemory(of_source, max_num_seqs + 1, max_source_len)
        self.targets = RowMemory(shape, max_num_seqs + 1, max_model_len)
        self._sequence_memories = self._memories = (self.sources, self.targets)
        self.min_chunk = max_source_len  # a source is never cut
        self.state_bytes = shape.state_bytes
        super().__init__(
            max_num_seqs=max_num_seqs,
            budget_tokens=budget_tokens,
            token_bytes=max(shape.token_bytes(), of_source.token_bytes()),
            cache=PrefixCache(),
        )

    def admit(self, n_prompt: int, max_tokens: int, _names: list[bytes]) -> tuple[int, int] | None:
        """See KVStore; max_tokens: of the whole target."""
        if not self.free_rows or (
            self.reserved_tokens + n_prompt + max_tokens > self.budget_tokens
        ):
            return None
        row = self._take_row()
        self.sources.reserve(row, n_prompt)
        self.targets.reserve(row, max_tokens)
        self._keep_to_budget()
        return row, 0

    def record_prefill(self, row: int, start: int, end: int, names: list[bytes]) -> None:
        """Do nothing: the run has written a source to where it stays."""

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy a target's tokens [start, end) to another row, and with the first the source."""
        self.targets.copy(source, target, start, end)
        if not start:
            self.sources.copy(source, target, 0, self.sources.reserved[source])
