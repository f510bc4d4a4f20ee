"""Models that several test files share: exporting one takes seconds."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._export import utils as export_utils
from torch.onnx._internal._lazy_import import onnxscript_apis  # type: ignore[attr-defined]

from tests.random_models import RandomModel, export_random

# A slow machine is no failure of the code under test.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# What a shell sets for Kvasir, its clients, terminals and tools is not what tests expect.
OF_CALLER = re.compile(
    "(KVASIR|OTEL|OPENAI|ANTHROPIC|AWS|HF|GIT|SSL)_.*|.*_PROXY|(FORCE|NO)_COLOR|COLUMNS|LINES|"
    "GITHUB_ACTIONS|MPLBACKEND|(LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT",
    re.IGNORECASE,
)
for name in filter(OF_CALLER.fullmatch, list(os.environ)):
    del os.environ[name]

# Processes that tests start would ignore what this one was started to ignore: SIGHUP by nohup,
# SIGINT as a shell's background job. They do not inherit a handler, not even an empty one.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
    if signal.getsignal(number) == signal.SIG_IGN:
        ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if ctrl_c else lambda *_: None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give a test the same random numbers, whichever ran before it in this process."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def drawn_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same ones in every run."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Use one thread: tensors are tiny here, and a second thread costs more than it saves."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def operators_read_once() -> Iterator[None]:
    """Let PyTorch list its operators once: an export takes a quarter less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxscript_apis, "get_torchlib_ops", cache(onnxscript_apis.get_torchlib_ops))
        once = cache(export_utils._materialize_cpp_cia_ops)
        patch.setattr(export_utils, "_materialize_cpp_cia_ops", once)
        yield


SHAPE: dict[str, Any] = {"max_model_len": 200, "n_layer": 3, "n_head": 6, "head_dim": 32}
SHAPE |= {"d_model": 192, "d_ff": 320}


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


@pytest.fixture(scope="session")
def random_windowed_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Windows, soft caps, head norms and layers that differ, as in published decoders, in int8."""
    changes: dict[str, Any] = {
        "sliding_window": 40,
        "sliding_window_layers": (0, 2),
        "layers_without_rotary": (1,),
        "sliding_window_rope_theta": 100.0,
    }
    changes |= {
        "attention_softcap": 20.0,
        "logit_softcap": 30.0,
        "qk_norm": True,
        "qk_norm_across_heads": True,
        "norm_placement": "both",
    }
    return export_random(
        tmp_path_factory.mktemp("random_windowed_model"), "int8", **SHAPE, **changes
    )


MIXTURE: dict[str, Any] = {"n_experts": 6, "n_experts_per_token": 3, "d_expert": 96}


@pytest.fixture(scope="session")
def random_mixture_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Experts in float32, whose kernel adds in another order where one row comes alone."""
    return export_random(tmp_path_factory.mktemp("random_mixture_model"), **SHAPE, **MIXTURE)


@pytest.fixture(scope="session")
def random_int8_mixture_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """The same decoder, quantised."""
    folder = tmp_path_factory.mktemp("random_int8_mixture_model")
    return export_random(folder, "int8", **SHAPE, **MIXTURE, dense_layers=(1,))


@pytest.fixture(scope="session")
def random_int4_mixture_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Everything that gpt-oss has, in int4: biases, clamped gates, sinks and windows."""
    changes: dict[str, Any] = {
        "feed_forward": "swiglu_clamped",
        "normalize_expert_shares": True,
        "attention_sinks": True,
        "sliding_window": 40,
        "sliding_window_layers": (0, 2),
        **dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True),
    }
    folder = tmp_path_factory.mktemp("random_int4_mixture_model")
    return export_random(folder, "int4", **SHAPE, **MIXTURE, **changes)


@pytest.fixture(scope="session")
def random_biased_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Scores with a learned bias by distance, over int8 rows; both sublayers read one input."""
    changes: dict[str, Any] = {
        "position": "relative",
        "parallel_residual": True,
        "norm": "layernorm",
        "feed_forward": "geglu_tanh",
        "embedding_norm": True,
        "tied_embeddings": False,
        "head_bias": True,
    }
    return export_random(tmp_path_factory.mktemp("random_biased_model"), "int8", **SHAPE, **changes)
