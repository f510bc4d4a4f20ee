"""A fake runner whose steps take as long as a small model's, without the interpreter's lock."""

from __future__ import annotations

import threading
from time import sleep
from typing import Any

from server.engine.batch import StepBatch
from server.engine.logits import Logits
from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE

_SECONDS = 0.005


class PacedRunner(FakeRunner):
    """A runner for servers beside whose faults a stream is timed. steps: released for each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(VOCAB_SIZE, **options)
        self.steps = threading.Semaphore(0)

    def run(self, batch: StepBatch) -> Logits:
        sleep(_SECONDS)
        self.steps.release()
        return super().run(batch)
