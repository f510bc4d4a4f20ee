"""Models that several test files share: exporting one takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.random_models import RandomModel, export_random


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tensors are tiny here: waking a second thread costs more than it saves, many times more on a busy machine."""
    torch.set_num_threads(1)


SHAPE: dict[str, Any] = {"max_model_len": 200, "n_layer": 3, "n_head": 6, "head_dim": 32, "d_model": 192, "d_ff": 320}


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Rotary, RMSNorm, SwiGLU, grouped-query: the variant that most models are."""
    return export_random(tmp_path_factory.mktemp("random_model"), **SHAPE)


@pytest.fixture(scope="session")
def random_int8_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """The same decoder, quantised."""
    return export_random(tmp_path_factory.mktemp("random_int8_model"), "int8", **SHAPE)


@pytest.fixture(scope="session")
def random_int4_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return export_random(tmp_path_factory.mktemp("random_int4_model"), "int4", **SHAPE)
