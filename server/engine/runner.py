"""The model on ONNX Runtime: turns a batch into runs over rows of keys and values.

A run binds raw addresses, so a batch is a window onto the rows: all decodes run over rows 0..n-1, a prompt's chunk over
its own row, whole prompts of nearly one length over neighbouring rows, padded on the right. Past and present are the
same memory; nothing is copied or concatenated.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.bundle import DECODE_INPUT
from model.config import DecoderConfig
from server.engine.engine import SCORING_LOGITS_BYTES, check_max_model_len
from server.engine.kv.rows import KVRows, RowMemory
from server.engine.machine import SPIN_MICROSECONDS, available_memory, usable_cpus
from server.engine.sampling import Floats, SamplingParams
from server.engine.scheduler import Batch, Chunk
from server.engine.sequence import Sequence, SequenceTimes
from server.engine.session import InferenceSession, open_session
from server.engine.speculation import DraftPolicy

_PRESENT = {
    "past_key_values": "present",
    "prompt_key_values": "prompt_present",
}  # rows come in and go out
MOST_PADDED = 1.25  # tokens that a run of several prompts may have for each that it needs


class OnnxRunner:
    """One session, one set of rows, one buffer for each small input.

    max_model_len: at most the model's, which None means. kv_cache_bytes: what admission may promise; None is half of
    the memory that is free once the model is loaded. threads: None is every processor this process may use.
    Raises ValueError for a limit that the model or the machine cannot meet.
    """

    def __init__(
        self,
        graph: Path,
        config: DecoderConfig,
        *,
        max_num_seqs: int,
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        threads: int | None = None,
        spin_microseconds: int = SPIN_MICROSECONDS,
    ) -> None:
        self.max_model_len = check_max_model_len(max_model_len, config)
        self.vocab_size = config.vocab_size
        self.model_seconds = 0.0  # spent inside ONNX Runtime so far
        self._session = open_session(graph, threads or usable_cpus(), spin_microseconds)
        self.kv_cache_bytes = available_memory() // 2 if kv_cache_bytes is None else kv_cache_bytes
        self.rows = self._make_rows(config, max_num_seqs)
        n_scored = max(2, SCORING_LOGITS_BYTES // (4 * self.vocab_size))
        n_logits = (
            max_num_seqs + n_scored + DraftPolicy().max_step
        )  # untouched memory is not committed
        self._logits: Floats = np.empty((n_logits, self.vocab_size), dtype=np.float32)
        self._decodes: dict[int, _Binding] = {}  # by rows in the window
        self._chunks: dict[tuple[RowMemory, int, int], _Binding] = {}  # by first row, and rows

    def _make_rows(self, config: DecoderConfig, max_num_seqs: int) -> KVRows:
        shape = {
            "n_layer": config.n_layer,
            "n_kv_head": config.n_kv_head,
            "head_dim": config.head_dim,
        }
        rounded = any(value.name == DECODE_INPUT for value in self._session.get_inputs())
        dtype = np.dtype(np.int8 if rounded else np.float32)
        per_token = KVRows.bytes_per_token(**shape, itemsize=dtype.itemsize)
        per_prompt_token = KVRows.bytes_per_token(**shape)
        least = 2 * (per_token + per_prompt_token)
        if self.kv_cache_bytes < least:
            raise ValueError(
                f"kv_cache_memory of {self.kv_cache_bytes} bytes holds no prompt: two tokens take {least}"
            )
        most = self.max_model_len * (
            max_num_seqs * per_token + per_prompt_token
        )  # every row full, and a prompt's
        budget_tokens = min(self.kv_cache_bytes, most) // per_token
        return KVRows(
            **shape,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            budget_tokens=budget_tokens,
            dtype=dtype.type,
        )

    def warm_up(self) -> None:
        """Run a decode step and a chunk once, so that the first request pays for neither."""
        row = self.rows.allocate(2)
        assert row is not None
        first = Sequence(
            -1, [0, 0], SamplingParams(max_tokens=0), frozenset(), SequenceTimes(0.0), row=row
        )
        self._run_chunks([Chunk(first, start=0, count=2, n_logits=1)], first_logit=0)
        self._run_window([None], live=[])
        self.rows.free(row)

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocab]: a row per decode, then each prefill's, then each draft's, in order.

        Valid until the next run.
        """
        n = len(batch.decodes)
        if batch.decodes:
            decoding = {chunk.sequence for chunk in batch.decodes}
            self._run_window(
                batch.window, [row for row, holder in enumerate(batch.window) if holder in decoding]
            )
        for chunks in (*self._side_by_side(batch.prefills), *([chunk] for chunk in batch.drafts)):
            n += self._run_chunks(chunks, first_logit=n)
        return self._logits[:n]

    def _run_window(self, window: list[Sequence | None], live: list[int]) -> None:
        """One token for the sequences in rows `live` of 0..n-1.

        A hole, and a row whose prompt is not finished or that has a draft, ride along: what they write at their own
        length is overwritten by whatever comes next, so this run is the first of a step.
        """
        n = len(window)
        if n not in self._decodes:
            self._decodes[n] = _Binding(
                self._session, self.rows.running, row=0, batch=n, capacity=1
            )
        binding = self._decodes[n]
        lengths = [holder.n_computed if holder else 0 for holder in window]
        binding.input_ids[:] = [holder.last_token_id if holder else 0 for holder in window]
        binding.position_ids[:] = lengths
        self.model_seconds += binding.run(
            lengths, sequence=1, logits_indices=live, logits=self._logits
        )

    def _run_chunks(self, chunks: list[Chunk], first_logit: int) -> int:
        """A chunk over its own row, or whole prompts over neighbouring rows, padded on the right; returns n logits.

        What padding writes is overwritten by the row's next tokens.
        """
        batch, longest = len(chunks), max(chunk.count for chunk in chunks)
        memory, row = self._place(chunks[0])
        binding = self._chunks.get((memory, row, batch))
        if binding is None or binding.input_ids.size < batch * longest:
            binding = _Binding(self._session, memory, row=row, batch=batch, capacity=longest)
            self._chunks[memory, row, batch] = binding
        ids = binding.input_ids[: batch * longest].reshape(batch, longest)
        positions = binding.position_ids[: batch * longest].reshape(batch, longest)
        indices: list[int] = []
        for i, chunk in enumerate(chunks):
            ids[i] = chunk.token_ids + [0] * (longest - chunk.count)
            positions[i] = np.arange(chunk.start, chunk.start + longest)
            end = i * longest + chunk.count
            indices += range(end - chunk.n_logits, end)
        self.model_seconds += binding.run(
            [chunk.end - 1 for chunk in chunks],
            sequence=longest,
            logits_indices=indices,
            logits=self._logits[first_logit:],
        )
        return len(indices)

    def _side_by_side(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Chunks in the runs they share: whole prompts of nearly one length on neighbouring rows go together.

        A run reads every weight once, however many prompts it holds. A prompt of one token runs alone, as every
        product of a single row takes a kernel of its own.
        """
        runs: list[list[Chunk]] = []
        for chunk in chunks:
            last = runs[-1] if runs else []
            together = [*last, chunk]
            longest = max(c.count for c in together)
            fits = longest * len(together) <= MOST_PADDED * sum(c.count for c in together)
            whole = all(
                c.start == 0 and c.count > 1 and c.n_logits <= 1 and c.completes_prompt
                for c in together
            )
            rows = [self._place(c)[1] for c in together]
            adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
            if last and fits and whole and adjacent and self.rows.pad(rows, longest):
                last.append(chunk)
            else:
                runs.append([chunk])
        return runs

    def _place(self, chunk: Chunk) -> tuple[RowMemory, int]:
        """Where a chunk's tokens go: to the row of the running sequence whose draft it is, or to the prompt's."""
        row = chunk.sequence.row
        assert row is not None
        return (
            (self.rows.running, row)
            if chunk.draft
            else (self.rows.prompts, self.rows.prompt_row(row))
        )


class _Binding:
    """Where one shape of run reads and writes: rows `row` … `row + batch - 1` and its own small inputs, bound once.

    memory: of prompts, or of running sequences. A graph that has a type of row for each is told which by its input
    `decode`, and gets a row of nothing for the other. input_ids, position_ids: int64 [batch · capacity], of which a
    run takes the first batch · sequence.
    """

    def __init__(
        self, session: InferenceSession, memory: RowMemory, *, row: int, batch: int, capacity: int
    ) -> None:
        self._session = session
        self._n_positions = memory.n_positions
        self._batch = batch
        self._io = session.io_binding()
        self._bound: tuple[int, int, int] | None = None
        self.input_ids = np.zeros(batch * capacity, dtype=np.int64)
        self.position_ids = np.zeros(batch * capacity, dtype=np.int64)
        self._logits_indices = np.zeros(batch * capacity, dtype=np.int64)
        self._seqlens_k = np.zeros(batch, dtype=np.int32)
        self._total = np.zeros((), dtype=np.int32)
        self._bind_input("seqlens_k", self._seqlens_k, (batch,))
        self._bind_input("total_sequence_length", self._total, ())
        types = {value.name: value.type for value in session.get_inputs()}
        self._decode = np.array(memory.dtype == np.int8)
        if DECODE_INPUT in types:
            self._bind_input(DECODE_INPUT, self._decode, ())
        n_head, _, head_dim = memory.row_shape
        self._nothing = np.zeros((1, n_head, 1, head_dim), dtype=np.float32)
        for name, kind in types.items():
            family, _, place = name.partition(".")  # past_key_values, 3.key
            if family not in _PRESENT:
                continue
            layer, part = place.split(".")
            dtype = np.dtype(np.int8 if kind == "tensor(int8)" else np.float32)
            if dtype == memory.dtype:
                address = memory.address(2 * int(layer) + (part == "value"), row)
                shape = (batch, *memory.row_shape)
                self._io.bind_input(name, "cpu", 0, dtype.type, shape, address)
                self._io.bind_output(
                    f"{_PRESENT[family]}.{place}", "cpu", 0, dtype.type, shape, address
                )
            else:
                self._io.bind_input(
                    name, "cpu", 0, dtype.type, self._nothing.shape, self._nothing.ctypes.data
                )
                self._io.bind_output(f"{_PRESENT[family]}.{place}", "cpu")

    def run(
        self, seqlens_k: list[int], *, sequence: int, logits_indices: list[int], logits: Floats
    ) -> float:
        """Run `sequence` tokens of each row; write a row of `logits` for each index. Returns the model's seconds."""
        longest = max(seqlens_k)
        if longest >= self._n_positions:  # ONNX Runtime would write past the row without a word
            raise ValueError(
                f"a row of {self._n_positions} positions cannot hold {longest + 1} tokens"
            )
        self._seqlens_k[:] = seqlens_k
        self._total[()] = longest + 1
        n_logits = len(logits_indices)
        self._logits_indices[:n_logits] = logits_indices
        shape = (sequence, n_logits, logits.ctypes.data)
        if shape != self._bound:
            self._bind_input("input_ids", self.input_ids, (self._batch, sequence))
            self._bind_input("position_ids", self.position_ids, (self._batch, sequence))
            self._bind_input("logits_indices", self._logits_indices, (n_logits,))
            self._io.bind_output(
                "logits", "cpu", 0, np.float32, (n_logits, logits.shape[1]), logits.ctypes.data
            )
            self._bound = shape
        started = perf_counter()
        self._session.run_with_iobinding(self._io)
        return perf_counter() - started

    def _bind_input(self, name: str, buffer: NDArray[Any], shape: tuple[int, ...]) -> None:
        self._io.bind_input(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)
