"""Grammars are tried in one process for each tokenizer: starting one takes most of a test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from threading import Lock
from typing import Any

import pytest

from kvasir.server.engine.grammar import trial
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.grammar.trial import GrammarTrial


class SharedTrial(GrammarTrial):
    """A process that outlives each server which uses it, and ends with this one."""

    def __init__(self, *model: Any) -> None:
        super().__init__(*model)
        self._lock = Lock()

    def check(self, grammar: Grammar) -> str:
        with self._lock:
            return super().check(grammar)

    def close(self) -> None:
        """Stay open."""


shared_trial = cache(SharedTrial)


@pytest.fixture(scope="package", autouse=True)
def shared_trials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "GrammarTrial", shared_trial)
        yield
