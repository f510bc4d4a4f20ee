"""Contexts of 131,072 tokens: what is computed at their end is what is computed near the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.kernels.library import FILE, Library
from kvasir.server.engine.batch import Chunk, StepBatch
from kvasir.server.engine.gpu.runner import PagedRunner
from kvasir.server.engine.packed import open_packed_runner
from kvasir.server.engine.runner import OnnxRunner
from kvasir.server.engine.sampling.params import Floats, SamplingParams
from kvasir.server.engine.sequence import SequenceStatus
from tests.kernels.graphs import needs_library
from tests.kit.engine_driver import make_sequence
from tests.kit.random_models import export_random

LONGEST = 131_072
WINDOW = 16  # two layers see 31 tokens
TOKENS = np.random.default_rng(0).integers(300, size=70).tolist()


def logits_after(runner: OnnxRunner | PagedRunner, place: int) -> Floats:
    """Return the logits after TOKENS at a place, and after a token more [2, vocab]."""
    sequence = make_sequence(0, [0] * place + TOKENS, SamplingParams(max_tokens=2))
    end = len(sequence.prompt_ids)
    admitted = runner.kv.admit(end, 2, [])
    assert admitted is not None
    sequence.rows, sequence.status = [admitted[0]], SequenceStatus.PREFILLING
    after_prompt = runner.run(StepBatch(prefills=[Chunk(sequence, place, len(TOKENS), 1)]))[0:1]
    rows = [after_prompt.copy()]
    runner.kv.record_prefill(sequence.rows[0], place, end, [])
    sequence.status, sequence.n_computed, sequence.output_ids = SequenceStatus.RUNNING, end, [7]
    rows.append(runner.run(StepBatch([Chunk(sequence, end, 1, 1)], [sequence]))[0:1])
    runner.kv.free(sequence.rows[0])
    return np.concatenate(rows)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int8", marks=needs_library)])
def test_the_last_positions_are_as_good_as_the_first(precision: str, tmp_path: Path) -> None:
    """Windows hide what is before, and rotary attention depends on distances alone.

    Would catch offsets and tables that are too short, and angles that are not exact.
    """
    model = export_random(tmp_path, precision, max_model_len=LONGEST, sliding_window=WINDOW)
    options: dict[str, Any] = {
        "max_num_seqs": 2,
        "threads": 1,
        "kv_cache_bytes": 2**31,
        "prefix_cache_bytes": 0,
    }
    runner = (
        OnnxRunner(model.graph, model.config, **options)
        if precision == "fp32"
        else open_packed_runner(model.graph, model.config, Library(FILE, "auto"), **options)
    )
    near, far = (logits_after(runner, place) for place in (100, LONGEST - len(TOKENS) - 2))
    assert np.abs(near).max() > 1.0
    np.testing.assert_allclose(far, near, rtol=0.0, atol=1e-3 if precision == "fp32" else 0.1)
