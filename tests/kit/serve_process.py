"""A server process on a fake runner, for tests that send signals.

Run it as python -m tests.kit.serve_process OPTIONS_AS_JSON. The runner is held until a line on
standard input tells it to `allow` one run, to `release` all of them, or to `fail`. A line
`submitted` on standard output reports each request that reaches the engine. The option `loading` is
`works` or `hangs`; with `real` nothing is faked. Then `held` may name a function, as module:name,
that prints `held` after its work and returns after a line on standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sequence import Sequence
from kvasir.server.errors import StartupError
from kvasir.server.process.serve import serve
from kvasir.server.requests.async_engine import AsyncEngine, OutputStream
from kvasir.server.settings import load_settings
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE


def obey(runner: FakeRunner) -> None:
    for line in sys.stdin:
        getattr(runner, line.strip())()


def fake_the_model(loading: str) -> None:
    runner = FakeRunner(VOCAB_SIZE, max_num_seqs=1)
    runner.hold()
    submit = AsyncEngine.submit

    def announcing(engine: AsyncEngine, sequences: list[Sequence]) -> OutputStream:
        stream = submit(engine, sequences)
        print("submitted", flush=True)  # noqa: T201
        return stream

    def build(*_: object) -> Engine:
        if loading == "hangs":
            threading.Event().wait()
        return Engine(runner, chunk_size=8)

    patch.object(AsyncEngine, "submit", announcing).start()
    patch("kvasir.server.process.app.build_engine", build).start()
    threading.Thread(target=obey, args=(runner,), daemon=True).start()


def hold(name: str) -> None:
    work: Callable[..., Any] = resolve_name(name)

    def held(*arguments: Any, **options: Any) -> Any:
        result = work(*arguments, **options)
        print("held", flush=True)  # noqa: T201
        sys.stdin.readline()
        return result

    patch(name.replace(":", "."), held).start()


def main(arguments: list[str]) -> int:
    options = json.loads(arguments[0])
    loading = options.pop("loading", "works")
    if held := options.pop("held", ""):
        hold(held)
    if loading != "real":
        fake_the_model(loading)
    try:
        serve(load_settings(**options))
    except StartupError as error:
        print(f"kvasir: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
