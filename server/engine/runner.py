"""The model on ONNX Runtime on the CPU: a batch becomes runs over rows of the KV cache.

A run binds raw addresses, so its batch is a window onto the rows: all decodes run over rows 0..n-1,
a prompt's chunk over its own row, whole prompts of similar length over neighbouring rows, padded on
the right. Past and present are the same memory; nothing is copied or concatenated.

ONNX Runtime cuts the tokens of a product into blocks of 128 for its threads. On some CPUs a block
of a single token has a kernel that rounds differently: MatMulNBits of 4 bits does on x86 with AVX2
but without AVX-512. A trial run shows it when the model is loaded, and no run then leaves a token
alone in a block, except prompts of one token: those are never with others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvasir.kernels.library import Library
from kvasir.model.adapters.layout import Layout
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import DECODE_INPUT
from kvasir.model.platform.machine import usable_cpus
from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.adapters.stock import graph_adapters
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.kv.memory import KVShape, RowMemory
from kvasir.server.engine.kv.prefix_cache import BLOCK_SIZE, PrefixCache
from kvasir.server.engine.kv.rows import KVRows, n_rows
from kvasir.server.engine.model_runner import check_max_model_len, group_neighbours, kv_memory
from kvasir.server.engine.row_binding import RowBinding
from kvasir.server.engine.sampling.logits import Logits, most_logits
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.session import check_shape, open_session

TOKEN_BLOCK = 128  # of ONNX Runtime's MatMulNBits
MAX_PADDING = 1.25  # ratio of the tokens that a run of several prompts has to those it needs


class RowWork(NamedTuple):
    """A row's tokens, the position of the first, and the logits wanted of the last ones.

    moves_state: False for a row that only rides along.
    """

    tokens: list[int]
    start: int
    n_logits: int
    moves_state: bool = True
    adapter: Adapter | None = None


_NOBODY = RowWork([0], 0, 0, moves_state=False)


class OnnxRunner:
    """One session, its KV cache, and its input buffers.

    kv_cache_bytes: None is half of the memory that is free once the model is loaded, divided by
    n_models, the number of models that share it.
    prefix_cache_bytes: beside it; None is a tenth of it. threads: None is all usable processors.
    library: see `open_session`. layout: of adapters, if there may be some.

    Raises ValueError for a limit that the model or the machine cannot meet.
    """

    max_source_len = None
    drafts_exactly = False

    def __init__(
        self,
        graph: Path,
        config: TransformerConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        n_models: int = 1,
        prefix_cache_bytes: int | None = 0,
        threads: int | None = None,
        library: Library | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.adapters = graph_adapters(layout, library)
        self.max_model_len = check_max_model_len(max_model_len, config)
        self.vocab_size = config.vocab_size
        self.model_seconds = self.decode_seconds = 0.0  # spent in ONNX Runtime so far
        self._session = open_session(
            graph, threads or usable_cpus(), library=library, adapters=self.adapters
        )
        check_shape(self._session, config)
        n_bytes = kv_memory(kv_cache_bytes, n_models)
        shape = KVShape(*config.cache_shape)
        # In a graph that chooses, running sequences have int8 keys and values.
        chooses = any(value.name == DECODE_INPUT for value in self._session.get_inputs())
        dtype = np.int8 if chooses else np.float32
        itemsize = np.dtype(dtype).itemsize
        per_token, per_prompt_token = shape.token_bytes(itemsize), shape.token_bytes()
        of_states = shape.state_bytes * n_rows(max_num_seqs)
        least = 2 * (per_token + per_prompt_token) + of_states
        if n_bytes < least:
            beside = (
                f", and the states of {max_num_seqs} sequences {of_states}" if of_states else ""
            )
            raise ValueError(
                f"kv_cache_memory of {n_bytes} bytes holds no prompt: two tokens take "
                f"{least - of_states}{beside}; raise it, or lower max_num_seqs"
            )
        n_bytes -= of_states
        most = self.max_model_len * (max_num_seqs * per_token + per_prompt_token)  # of full rows
        cache_bytes = n_bytes // 10 if prefix_cache_bytes is None else prefix_cache_bytes
        self.kv = KVRows(
            shape,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            budget_tokens=min(n_bytes, most) // per_token,
            dtype=dtype,
            cache=PrefixCache.within(cache_bytes, BLOCK_SIZE * per_prompt_token, shape.state_bytes),
        )
        n_logits = most_logits(max_num_seqs, self.vocab_size)  # untouched memory is free
        self._logits: Floats = np.empty((n_logits, self.vocab_size), dtype=np.float32)
        self._bindings: dict[tuple[RowMemory, int, int], RowBinding] = {}  # by first row, rows
        self._never_alone = False
        self._never_alone = lone_token_differs(self._decode_one, self._logits)
        self.model_seconds = self.decode_seconds = 0.0

    def run(self, batch: StepBatch) -> Logits:
        """See Runner.

        The decode run comes first. It covers all rows of the window, though only decodes get
        logits: what it writes after the tokens of other rows is overwritten by what comes next.
        """
        n_done = 0
        if batch.decodes:
            decoding = {chunk.sequence for chunk in batch.decodes}
            n_rows = batch.decodes[-1].row + 1
            n_rows += self._leaves_one_alone(n_rows)
            window = [
                RowWork(
                    [s.last_token_id], s.n_computed, int(s in decoding), s in decoding, s.adapter
                )
                if s
                else _NOBODY
                for s in [*batch.window, None][:n_rows]
            ]
            n_done = self._run(self.kv.running, 0, window, 0)
        prompts = group_neighbours(batch.prefills, self._pad_into_one_run)
        for chunks in (*prompts, *([chunk] for chunk in batch.drafts)):
            # Prompts are padded on the right; a row's next tokens overwrite what padding writes.
            work = [
                RowWork(each.token_ids, each.start, each.n_logits, adapter=each.sequence.adapter)
                for each in chunks
            ]
            runs = [work]
            if len(work) == 1 and chunks[0].count > 1 and self._leaves_one_alone(chunks[0].count):
                runs = [[part] for part in _split_last_two(work[0])]
            for work in runs:
                n_done += self._run(*self._place(chunks[0]), work, n_done)
        return Logits.of(self._logits[:n_done])

    def _decode_one(self, token_id: int, position: int, n_rows: int, first_logit: int) -> None:
        work = [RowWork([token_id], position, 1, moves_state=False), _NOBODY][:n_rows]
        self._run(self.kv.running, 0, work, first_logit)

    def _leaves_one_alone(self, n_tokens: int) -> bool:
        """Return whether a run of `n_tokens` gives one token other bits than in another run."""
        return self._never_alone and n_tokens % TOKEN_BLOCK == 1

    def _run(self, memory: RowMemory, row: int, work: list[RowWork], first_logit: int) -> int:
        """Run tokens over rows from `row` on; write logits from `first_logit` on; count them."""
        longest = max(len(row.tokens) for row in work)
        ids: list[int] = []
        positions: list[int] = []
        indices: list[int] = []
        for tokens, start, n_logits, *_ in work:
            n_padding = longest - len(tokens)
            ids += tokens
            indices += range(len(ids) - n_logits, len(ids))
            ids += [0] * n_padding
            positions += range(start, start + longest)
        key = memory, row, len(work)
        binding = self._bindings.get(key)
        if binding is None or binding.input_ids.size < len(ids):
            self._bindings[key] = binding = RowBinding(self._session, *key, capacity=len(ids))
        binding.input_ids[: len(ids)] = ids
        binding.position_ids[: len(ids)] = positions
        binding.n_new[:] = [len(row.tokens) * row.moves_state for row in work]
        if self.adapters is not None:
            binding.take(self.adapters.inputs([row.adapter for row in work]))
        ends = [row.start + len(row.tokens) for row in work]
        seconds = binding.run(ends, longest, indices, self._logits, first_logit)
        self.model_seconds += seconds
        self.decode_seconds += seconds if memory is self.kv.running else 0.0
        return len(indices)

    def _pad_into_one_run(self, group: list[Chunk]) -> bool:
        """Reserve the padding of chunks in one run; return False if they may not share it.

        They may if they are whole prompts or the beginnings of such, of similar length, on
        neighbouring rows. A run reads every weight once, however many prompts it holds. A prompt of
        one token runs alone, because a product of a single row has a kernel of its own.
        """
        longest = max(chunk.count for chunk in group)
        rows = [self._place(chunk)[1] for chunk in group]
        return (
            longest * len(group) <= MAX_PADDING * sum(chunk.count for chunk in group)
            and all(chunk.start == 0 and chunk.count > 1 and chunk.n_logits <= 1 for chunk in group)
            and rows == list(range(rows[0], rows[0] + len(rows)))
            and not self._leaves_one_alone(longest * len(group))
            and self.kv.pad(rows, longest)
        )

    def _place(self, chunk: Chunk) -> tuple[RowMemory, int]:
        """Return the row to write to: the running row for a draft, the prompt's for a prompt."""
        if chunk.draft:
            return self.kv.running, chunk.row
        return self.kv.prompts, self.kv.prompt_row(chunk.row)


def lone_token_differs(decode: Callable[[int, int, int, int], object], logits: Floats) -> bool:
    """Decode tokens alone and beside others; return whether any logits differ.

    decode: runs a token at a position in the first of so many rows, and writes its logits to a row
    of `logits` [n, vocab].
    """
    for i in range(4):
        token_id = i * (logits.shape[1] - 1) // 3
        decode(token_id, i % 2, 1, i)
        decode(token_id, i % 2, 2, 4 + i)
    return not np.array_equal(logits[:4], logits[4:8])


def _split_last_two(work: RowWork) -> list[RowWork]:
    """Split a chunk into all but its last two tokens, and those."""
    tokens, n_last = work.tokens, min(2, work.n_logits)
    first = work._replace(tokens=tokens[:-2], n_logits=work.n_logits - n_last)
    start = work.start + len(tokens) - 2
    return [first, work._replace(tokens=tokens[-2:], start=start, n_logits=n_last)]
