"""A server process on a fake runner, for tests that send signals: python -m tests.serve_process OPTIONS_AS_JSON.

The runner is held until standard input tells it to `allow` a run or to `release` them all, one command on a line.
Standard output says `submitted` for every request that reaches the engine. `loading` says how the model loads: it
works, fails, or hangs; with `real` nothing is faked.
"""

from __future__ import annotations

import json
import sys
import threading

import server.process.app
from server.engine.engine import Engine
from server.engine.sequence import Sequence
from server.errors import StartupError
from server.process.serve import run
from server.requests.async_engine import AsyncEngine, OutputStream
from server.settings import load_settings
from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE


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
        if loading == "fails":
            raise RuntimeError("the graph\nis damaged")
        if loading == "hangs":
            threading.Event().wait()
        return Engine(runner, chunk_size=8)

    AsyncEngine.submit = announcing  # type: ignore[assignment,method-assign]
    server.process.app.build_engine = build  # type: ignore[assignment]
    threading.Thread(target=obey, args=(runner,), daemon=True).start()


def main(arguments: list[str]) -> int:
    options = json.loads(arguments[0])
    loading = options.pop("loading", "works")
    if loading != "real":
        fake_the_model(loading)
    try:
        run(load_settings(**options))
    except StartupError as error:
        print(f"kvasir: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
