"""The nearest of known names, in errors of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.model.platform.suggestions import nearest
from kvasir.model.training.data.corpus import CorpusError
from kvasir.model.training.data.pairs import read_pairs
from kvasir.model.training.data.translations import read_translations


def test_the_nearest_name_is_found_and_strange_ones_have_none() -> None:
    known = ("max_tokens", "min_tokens", "temperature")
    assert nearest("max_tokenz", known) == "max_tokens"
    assert nearest("tempratur", known) == "temperature"
    assert nearest("x" * 10**6, known) is None


def test_fields_of_training_data_are_suggested(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"query": "a", "documant": "b"}))
    with pytest.raises(CorpusError, match="did you mean 'document'"):
        read_pairs([path], 0)
    path.write_text(json.dumps({"source": "a", "target": "b", "sorce": "c"}))
    with pytest.raises(CorpusError, match="did you mean 'source'"):
        read_translations([path], 0)
