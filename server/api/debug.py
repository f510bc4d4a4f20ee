"""GET /debug/batch: who shares the engine now."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request

from server.api.responses import service_of
from server.engine.sequence import Sequence, SequenceStatus

router = APIRouter()


@router.get("/debug/batch")
async def batch(request: Request) -> dict[str, Any]:
    """Every sequence that has not ended: ids, lengths and states, never text.

    The engine's thread changes them meanwhile. Each value is read in one go, and they need not agree: a snapshot taken
    between two steps would, but there is none of an engine that hangs, which is when somebody looks here.
    """
    service = service_of(request)
    now = perf_counter()
    states = [(sequence, sequence.status) for sequence in service.engine.sequences]
    return {
        "max_num_seqs": service.settings.max_num_seqs,
        "sequences": [
            _shown(s, status, now) for s, status in states if status is not SequenceStatus.FINISHED
        ],
    }


def _shown(sequence: Sequence, status: SequenceStatus, now: float) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "sequence_id": sequence.id,
        "state": status.value,
        "row": sequence.row,
        "prompt_tokens": len(sequence.prompt_ids),
        "cached_tokens": sequence.n_cached,
        "computed_tokens": sequence.n_computed,
        "generated_tokens": len(sequence.output_ids),
        "max_tokens": sequence.params.max_tokens,
        "seconds": round(now - sequence.times.arrived, 3),
    }
