"""Models that several files here share."""

from __future__ import annotations

import pytest

from tests.kit.numpy_session import export_paged
from tests.kit.random_models import RandomModel


@pytest.fixture(scope="session")
def paged_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """A graph over blocks, which numpy runs."""
    folder = tmp_path_factory.mktemp("paged")
    return export_paged(folder, sliding_window=30, sliding_window_layers=(1,), qk_norm=True)
