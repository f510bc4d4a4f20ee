"""The logits that a step's runs leave, and the likeliest tokens where the graph chooses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.sampling.speculation import MAX_DRAFTED

SCORING_LOGITS_BYTES = 64 * 2**20  # bound on the logits of one chunk of a scored prompt


def most_logits(max_num_seqs: int, vocab_size: int) -> int:
    """Return the most rows of a step: of all sequences, a chunk of a scored prompt, and drafts."""
    n_scored = max(2, SCORING_LOGITS_BYTES // (4 * vocab_size))
    return max_num_seqs + n_scored + MAX_DRAFTED


class Candidates(NamedTuple):
    """The likeliest tokens of each row, in an order that ties leave open.

    ids, logits: [rows, n], likeliest first. log_totals: [rows], the log of the sum of the
    exponentials of the whole row. tempered_totals: [rows], that of the row minus its largest logit,
    divided by the temperature.
    """

    ids: NDArray[np.int64]
    logits: Floats
    log_totals: Floats
    tempered_totals: Floats

    @classmethod
    def unpack(cls, packed: Floats) -> Candidates:
        """Take apart what a graph returns, [rows, 3 n]; see `export.graphs.tail`."""
        n = packed.shape[1] // 3
        ids = packed[:, 2 * n :].astype(np.int64)
        return cls(ids, packed[:, n : 2 * n], packed[:, 0], packed[:, 1])


class Logits:
    """Rows of logits [n_rows, vocab], which a slice reads from where they are, valid until a run.

    read: returns the rows from one to before another. candidates: None where the graph has none.
    """

    def __init__(
        self, n_rows: int, read: Callable[[int, int], Floats], candidates: Candidates | None = None
    ) -> None:
        self._n_rows = n_rows
        self._read = read
        self.candidates = candidates

    @classmethod
    def of(cls, rows: Floats, candidates: Candidates | None = None) -> Logits:
        """Return rows that are in memory."""
        return cls(len(rows), lambda start, stop: rows[start:stop], candidates)

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, rows: slice) -> Floats:
        start, stop, _ = rows.indices(self._n_rows)
        return self._read(start, stop)
