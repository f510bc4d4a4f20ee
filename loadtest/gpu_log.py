"""Figures of a check, written as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console


class SkippedError(Exception):
    """A figure that this machine cannot give, and why."""


class FigureLog:
    """Figures on the screen and in a file as they come. A failure costs only its own figure."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    def note(self, name: str, measure: Callable[..., Any], *arguments: Any) -> None:
        """Measure something, or note why that failed or was skipped."""
        try:
            found = measure(*arguments)
        except SkippedError as reason:
            found = {"skipped": str(reason)}
        except Exception as error:  # a card, a driver or a peer may raise anything
            self.failures.append(name)
            found = {"failed": f"{type(error).__name__}: {error}"}
        self.figures[name] = found
        Console().print(name, found, markup=False)
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(self.figures, indent=2) + "\n", encoding="utf-8")
