"""A process with limits that is ended while it answers has not answered."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvasir.model.platform import limited_process
from kvasir.model.platform.limited_process import LimitedProcess


@pytest.mark.parametrize("written", ["", "[1", "1"])
def test_a_part_of_an_answer_is_none(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"print({written!r}, end='')"]
        return subprocess.Popen(command, **options)

    monkeypatch.setattr(limited_process, "Popen", ending)
    process = LimitedProcess("any")
    with pytest.raises(ChildProcessError):
        process.ask("anything")
    assert process.process.poll() is not None
