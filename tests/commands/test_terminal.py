"""A terminal: a completion in pieces, and bars beside lines, as an emulator shows them."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvasir.model.directory import GRAPH_FILE, ModelDirectory
from kvasir.model.reference import generate as oracle
from kvasir.model.tokenizer import train_tokenizer
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.process.library import complete
from tests.kit.random_models import RandomModel

TEXT = "for name, value in zip(names, values): print(f'{name} = {value}')"


@pytest.fixture(scope="module")
def served(random_model: RandomModel) -> tuple[Engine, ModelDirectory]:
    tokenizer = train_tokenizer([Path(__file__).read_text()], random_model.config.vocab_size)
    assert tokenizer.get_vocab_size() == random_model.config.vocab_size
    folder = random_model.graph.parent
    model_dir = ModelDirectory(folder, random_model.config, manifest=None, tokenizer=tokenizer)  # type: ignore[arg-type]
    assert model_dir.graph_path == folder / GRAPH_FILE
    return Engine(random_model.runner(max_num_seqs=1), chunk_size=16), model_dir


def test_the_pieces_are_the_oracles_text(
    random_model: RandomModel, served: tuple[Engine, ModelDirectory]
) -> None:
    engine, model_dir = served
    prompt_ids = model_dir.tokenizer.encode(TEXT).ids
    params = SamplingParams(max_tokens=20, temperature=0.0)
    *pieces, last = complete(engine, model_dir, prompt_ids, params)
    text = "".join(piece.text for piece in [*pieces, last])
    ids = oracle(random_model.decoder, prompt_ids, max_tokens=20)
    assert text == model_dir.tokenizer.decode(prompt_ids + ids)[len(TEXT) :]
    assert [piece.token_id for piece in pieces] == ids
    assert last.finish_reason == ("stop" if len(ids) < 20 else "length")


def screen_of(code: str, *, press_at: bytes = b"", columns: int = 60) -> list[str]:
    """Run Python in a terminal; return the lines of the screen at its end.

    press_at: output at which Ctrl-C is pressed.
    """
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(columns, 40)
    stream = pyte.ByteStream(screen)
    pid, fd = pty.fork()
    if not pid:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
        os.execve(sys.executable, [sys.executable, "-c", code], environment)  # noqa: S606
    seen = b""
    with suppress(OSError):  # the end
        while data := os.read(fd, 4096):
            stream.feed(data)
            seen += data
            if press_at and press_at in seen:
                os.write(fd, b"\x03")
                press_at = b""
    os.waitpid(pid, 0)
    os.close(fd)
    return [line.rstrip() for line in screen.display if line.strip()]


BAR = """
import os
from time import sleep
from kvasir.commands.console import progress
progress._DELAY = 0
try:
    with progress.ProgressBar() as bar:
        bar._timer.join()
        for i in range(1, 7):
            bar("training", i, 1000 + 6 * {long}, "loss 1.0 · 123,456,789 tokens/s" * i)
            bar._bar.refresh()
            if i % 2 == 0:
                bar.lines.print(f"step {{i}}", soft_wrap=True)
        print("waiting" if {long} else "done", flush=True)
        os.write(1, b"\\a")  # only now, since Ctrl-C in a flush would make it write twice
        while {long}:
            sleep(0.01)  # a signal just before a system call does not interrupt it
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_bar_leaves_no_copies_between_the_lines() -> None:
    """Lines beside the bar's console were glued to it, and a bar of two lines left one of them."""
    lines = ["step 2", "step 4", "step 6"]
    assert screen_of(BAR.format(long=False)) == [*lines, "done"]


def test_control_c_beside_a_bar_leaves_no_copy() -> None:
    """Terminals show ^C at the cursor, so a bar of the whole width continued on the next line."""
    stopped = screen_of(BAR.format(long=True), press_at=b"\a")
    assert stopped == ["step 2", "step 4", "step 6", "waiting", "stopped"]
