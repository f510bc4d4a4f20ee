"""A model directory with random weights that tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return tiny-int8 in a directory of its own, as `kvasir bench model` writes it."""
    cache = tmp_path_factory.mktemp("cache")
    out = cache / "models/tiny-int8"
    arguments = ["bench", "model", "--preset", "tiny", "--cache-dir", str(cache)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    return out
