"""Models that several files here share."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from kvasir.model.directory import GRAPH_FILE
from tests.kit.numpy_session import export_paged
from tests.kit.random_models import RandomModel, make_config, make_decoder


@pytest.fixture(scope="session")
def paged_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """A graph over blocks, which numpy runs; the first of pytest-xdist's workers exports it."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "paged_model"
    with FileLock(f"{folder}.lock"):
        if (folder / GRAPH_FILE).exists():
            return RandomModel(make_decoder(make_config()), folder / GRAPH_FILE)
        folder.mkdir()
        return export_paged(folder)
