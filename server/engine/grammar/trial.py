"""Trials of grammars in a process of their own: one that is too expensive ends only its trial.

llguidance's own limits do not cover every cost of a grammar: for a schema of a hundred characters
it can intersect patterns for minutes, until memory is used up, and that ends the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kvasir.model.platform.limited_process import (
    LimitedProcess,
    answer,
    limit_memory,
    limit_time,
    messages,
)
from kvasir.server.engine.grammar.compiler import GrammarCompiler
from kvasir.server.engine.grammar.constraints import Grammar, GrammarError

CPU_SECONDS = 0.5
MEMORY_BYTES = 32 * 2**20


class GrammarTrial:
    """A process that compiles grammars for one model's tokens, for use by one thread.

    It has to be closed. model: the arguments of GrammarCompiler.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.model = (tokenizer, vocab_size, list(eos_token_ids))
        self._process: LimitedProcess | None = None

    def start(self) -> LimitedProcess:
        """Start the process unless it runs. It reads the tokens, which may take seconds."""
        if self._process is None or self._process.process.poll() is not None:
            self.close()
            self._process = LimitedProcess(__name__, self.model)
        return self._process

    def check(self, grammar: Grammar) -> str:
        """Return a grammar's error, "" if it compiles. Raises OSError if the process ends."""
        return str(self.start().ask((grammar.kind, grammar.source)))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


def _main() -> None:
    """Answer each grammar by its error, or ""."""
    given = messages()
    compiler = GrammarCompiler(*json.loads(next(given)))
    with suppress(GrammarError):
        compiler.tokens  # noqa: B018  before the first fork
    for message in given:
        child = os.fork()
        if child == 0:
            _try(compiler, *json.loads(message))
        if os.waitpid(child, 0)[1]:
            answer(f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES // 2**20} MiB to compile")


def _try(compiler: GrammarCompiler, kind: Any, source: str) -> None:
    """Compile within the limits, and end this process; a signal ends it beyond them."""
    try:
        os.nice(10)
        limit_memory(MEMORY_BYTES)
        limit_time(CPU_SECONDS)
        error = ""
        try:
            compiler.compile(Grammar(kind, source, ""))
        except GrammarError as refusal:
            error = str(refusal)
        answer(error)
        os._exit(0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    _main()
