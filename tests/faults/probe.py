"""Parts that the probes of a served model share: goodput, soak and cold_start."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvasir.loadtest.load import Ask
from kvasir.loadtest.sse_client import Target, complete

EXAMPLE = Path(__file__).parents[2] / "examples/stdlib"
Model = Annotated[Path, typer.Argument(help="Model directory.")]
_TIMEOUT = 60.0  # seconds for any request


def asking(target: Target) -> Ask:
    """Return a function that requests one completion of a server."""
    return partial(complete, target, limit=_TIMEOUT)
