"""The process that compiles and renders chat templates: others wrote them, and they are programs.

Nothing but the end of its process stops a filter, or a compilation, that takes too long.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvasir.model.platform.limited_process import (
    LimitedProcess,
    answer,
    limit_memory,
    limit_time,
    messages,
    peak_kib,
)

if TYPE_CHECKING:
    from jinja2 import Template

MOST_TEXT = 2**24  # characters of a prompt: four times those of the largest body
# CPU time, of a compilation too. Templates such as Qwen3's need 0.2 s for a body of 4 MB.
_SECONDS, _SECONDS_PER_BYTE, _MOST_SECONDS = 0.5, 1e-6, 2.0
_MEMORY_BYTES = 2**27
_MOST_ERROR = 1000  # characters
_COMPILED = 16  # templates that a process keeps
# Processes that are kept: one for a long chat, and one beside it, if they never took more memory.
_IDLE, _IDLE_KIB = 2, 48 * 2**10

LIMITS = (
    f"it takes more than {_SECONDS:g} s of CPU time, {_MOST_SECONDS:g} s for a long chat, or "
    f"{_MEMORY_BYTES // 2**20} MiB of memory"
)

_idle: list[LimitedProcess] = []


def run_template(source: str, variables: dict[str, Any] | None) -> tuple[str, str]:
    """Return the text of a template and "", or "" and its error; None as variables compiles it.

    Raises ChildProcessError beyond the limits, and OSError if there can be no process.
    """
    try:
        process = _idle.pop()
    except IndexError:
        process = None
    if process is None or process.process.poll() is not None:
        process = LimitedProcess(__name__)
    text, error, n_kib = process.ask((source, variables))
    if len(_idle) < _IDLE and n_kib < _IDLE_KIB:
        _idle.append(process)
    return text, error


def _main() -> None:
    """Answer each template and its variables."""
    from kvasir.model.template.environment import environment  # noqa: PLC0415  Jinja, only here

    @lru_cache(_COMPILED)
    def compiled(source: str) -> Template:
        limit_time(_MOST_SECONDS)
        return environment().from_string(source)

    limit_memory(_MEMORY_BYTES)
    for message in messages():
        text, error = "", ""
        try:
            source, variables = json.loads(message)
            template = compiled(source)
            if variables is not None:
                limit_time(min(_SECONDS + _SECONDS_PER_BYTE * len(message), _MOST_SECONDS))
                text = template.render(variables)
                text.encode()  # fails for half a surrogate pair, which no tokenizer takes
            if len(text) > MOST_TEXT:
                text, error = "", f"it makes a text of more than {MOST_TEXT:,} characters"
        except MemoryError:
            os._exit(1)  # and with it what it took
        except RecursionError:
            error = "it nests too deeply"
        except Exception as failure:  # a template is a program: it can fail in any way
            text, error = "", str(failure)[:_MOST_ERROR] or type(failure).__name__
        answer((text, error, peak_kib()))
        limit_time(0)


if __name__ == "__main__":
    _main()
