"""The trial of a type of transformers: every end of it is an outcome, and a fault is seen."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kvasir.model.importing.families.decoders import DECODERS, WITH_VISION
from kvasir.model.importing.families.encoder_decoders import ENCODER_DECODERS
from kvasir.model.importing.families.encoders import ENCODERS
from kvasir.model.importing.families.missing import MISSING
from tests.families import trial
from tests.families.__main__ import part_of
from tests.families.trial import TYPES, Outcome, is_read, try_type
from tests.kit.families import FAMILIES


def test_what_is_said_to_be_missing_is_a_type_that_no_family_computes() -> None:
    assert MISSING.keys() <= TYPES.keys()
    assert not MISSING.keys() & {*DECODERS, *WITH_VISION, *ENCODERS, *ENCODER_DECODERS}


def test_what_a_family_reads_is_compared_with_transformers() -> None:
    assert {*DECODERS, *WITH_VISION} & TYPES.keys() <= {kind for kind, _ in FAMILIES.values()}


def test_parts_are_all_types_and_cost_alike() -> None:
    parts = [part_of(TYPES, i, 10) for i in range(10)]
    assert sorted(kind for part in parts for kind in part) == sorted(TYPES)
    read = [sum(map(is_read, part)) for part in parts]
    assert max(read) - min(read) <= 1
    assert part_of(reversed(TYPES), 3, 10) == parts[3]


def test_a_type_is_refused_with_a_reason_or_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = try_type("zamba")
    assert refused.what == "refused"
    assert MISSING["zamba"] in refused.why
    monkeypatch.delitem(MISSING, "zamba")  # as if transformers had just added it
    assert try_type("zamba") == Outcome("not yet")


def test_other_tokens_and_exceptions_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PROMPTS", (7,))
    monkeypatch.setattr(trial, "export_checkpoint", lambda *_, **__: (None, ()))
    monkeypatch.setattr(trial, "_serve", lambda *_: [[-1]])
    outcome = try_type("llama")
    assert outcome == Outcome("different", "greedy tokens after 7 tokens are others")
    assert outcome.is_fault

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no such class")

    monkeypatch.setattr(AutoConfig, "for_model", fail)
    assert try_type("llama") == Outcome("failed", "OSError: no such class")
