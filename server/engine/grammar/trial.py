"""Trials of grammars in a process of their own: one that is too expensive ends only its trial.

llguidance's own limits do not cover every cost of a grammar: for a schema of a hundred characters
it can intersect patterns for minutes, until memory is used up, and that ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import psutil

from server.engine.grammar.compiler import GrammarCompiler
from server.engine.grammar.constraints import Grammar, GrammarError

CPU_SECONDS = 0.5
MEMORY_BYTES = 32 * 2**20

_ROOT = Path(__file__).parents[3]


class GrammarTrial:
    """A process that compiles grammars for one model's tokens, for use by one thread.

    It has to be closed. model: the arguments of GrammarCompiler.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.model = (tokenizer, vocab_size, list(eos_token_ids))
        self._process: Popen[bytes] | None = None

    def start(self) -> Popen[bytes]:
        """Start the process unless it runs. It reads the tokens, which may take seconds."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-m", __name__]
            self._process = Popen(command, cwd=_ROOT, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)  # noqa: S603
            _send(self._process, self.model)
        return self._process

    def check(self, grammar: Grammar) -> str:
        """Return a grammar's error, "" if it compiles. Raises OSError if the process ends."""
        process = self.start()
        _send(process, (grammar.kind, grammar.source))
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise ChildProcessError("the process that tries grammars was ended")
        return str(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _send(process: Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # then there is no answer either
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _main() -> None:
    """Answer each grammar, a line of standard input, by a line: its error, or ""."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server, too
    compiler = GrammarCompiler(*json.loads(sys.stdin.readline()))
    with suppress(GrammarError):
        compiler.tokens  # noqa: B018  before the first fork
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _try(compiler, *json.loads(line))
        if os.waitpid(child, 0)[1]:
            _answer(f"it takes more than {CPU_SECONDS} s or {MEMORY_BYTES // 2**20} MiB to compile")


def _try(compiler: GrammarCompiler, kind: Any, source: str) -> None:
    """Compile within the limits, and end this process; a signal ends it beyond them."""
    try:
        os.nice(10)
        memory = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        error = ""
        try:
            compiler.compile(Grammar(kind, source, ""))
        except GrammarError as refusal:
            error = str(refusal)
        _answer(error)
        os._exit(0)
    finally:
        os._exit(1)


def _answer(error: str) -> None:
    print(json.dumps(error), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
