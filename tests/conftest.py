"""Models that several test files share: exporting one takes seconds."""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from kvasir.model.configuration.recurrences import DeltaRule
from kvasir.model.directory import GRAPH_FILE
from kvasir.server.telemetry.logs import QueuedHandler
from tests.kit.random_models import RandomModel, export_random, make_config, make_decoder
from tests.kit.traces import list_operators_once, trace_networks_once
from tests.model.variants import VARIANTS

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


# Files of fifteen seconds of CPU or more. A worker takes whole files: one that began last would end
# alone. Files that export the same networks are apart, so that the later ones find them traced.
LONGEST = ["test_adapters", "test_faults", "test_parity", "test_openapi", "test_explain"]
LONGEST += ["test_distributed", "test_paths", "test_encoder_decoders", "test_paged_graph"]
LONGEST += ["test_fuse", "test_smoothing", "test_compilation", "test_invariance", "test_run"]
LONGEST += ["test_long_work"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give a test the same random numbers, whichever ran before it in this process."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def drawn_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the same ones in every run."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Take back what `serve` in this process sets for all tests that follow."""
    yield
    logging.getLogger("kvasir").setLevel(logging.NOTSET)
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, QueuedHandler):
            logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Use one thread: tensors are tiny here, and a second thread costs more than it saves."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def fast_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace networks of equal structure once, in whichever worker, and list operators once."""
    with pytest.MonkeyPatch.context() as patch:
        trace_networks_once(patch, _shared_folder(tmp_path_factory))
        list_operators_once(patch)
        yield


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of all of pytest-xdist's workers."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def _exported(precision: str, shape: dict[str, Any]) -> Any:
    """Return a fixture: a model that is exported by whichever of pytest-xdist's workers asks first.

    Its folder has its name.
    """

    @pytest.fixture(scope="session")
    def model(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> RandomModel:
        folder = _shared_folder(tmp_path_factory) / str(request.fixturename)
        with FileLock(f"{folder}.lock"):
            if (folder / GRAPH_FILE).exists():
                return RandomModel(make_decoder(make_config(**shape)), folder / GRAPH_FILE)
            return export_random(folder, precision, **shape)

    return model


def _shared(precision: str = "fp32", **changes: Any) -> Any:
    """Return a fixture: a model whose matrices are as large as those that kernels cut up."""
    return _exported(precision, SHAPE | changes)


SHAPE: dict[str, Any] = {"max_model_len": 200, "n_layer": 2, "n_head": 6, "head_dim": 32}
SHAPE |= {"d_model": 192, "d_ff": 320}
WINDOWS: dict[str, Any] = {"sliding_window": 40, "sliding_window_layers": (0,)}
MIXTURE: dict[str, Any] = {"n_experts": 6, "n_experts_per_token": 3, "d_expert": 96}

# Rotary, RMSNorm, SwiGLU, grouped-query: the variant that most models are.
random_model = _shared()
random_int8_model = _shared("int8")
random_int4_model = _shared("int4")
# Windows, soft caps, norms of all heads and layers that differ, as in published decoders.
random_windowed_model = _shared(
    "int8",
    **WINDOWS,
    layers_without_rotary=(1,),
    sliding_window_rope_theta=100.0,
    attention_softcap=20.0,
    logit_softcap=30.0,
    qk_norm=True,
    qk_norm_across_heads=True,
    norm_placement="both",
)
# Experts in float32, whose kernel adds in another order where one row comes alone. The other
# precision's network is the same, so that it is traced once.
random_mixture_model = _shared(**MIXTURE, dense_layers=(1,))
random_int8_mixture_model = _shared("int8", **MIXTURE, dense_layers=(1,))
# Matrices that keys read, in most layers; three heads a key head, so that few numbers are in a row.
random_delta_model = _shared(
    "int8",
    n_layer=3,
    recurrence=DeltaRule(kernel=4, n_head=3, n_key_head=1, key_dim=24, value_dim=16),
    recurrent_layers=(0, 1),
    attention_gate=True,
)
# Smaller ones, which tests/export/test_parity.py traces, too: biases, clamped gates, sinks and
# windows beside experts; latents as keys and values, and matrices that forget by channel; states of
# short convolutions and of channels; matrices of Mamba-2 beside attention; no attention at all.
random_int4_mixture_model = _exported("int4", VARIANTS["gpt-oss"])
random_latent_model = _exported("int8", VARIANTS["ling"])
random_hybrid_model = _exported("int8", VARIANTS["lfm2"])
random_mamba_model = _exported("int8", VARIANTS["jamba"])
random_both_model = _exported("int4", VARIANTS["falcon h1"])
random_recurrent_model = _exported("int4", VARIANTS["without attention"])
# Scores with a learned bias by distance, over int8 rows; both sublayers read one input.
random_biased_model = _shared(
    "int8",
    position="relative",
    parallel_residual=True,
    norm="layernorm",
    feed_forward="geglu_tanh",
    embedding_norm=True,
    tied_embeddings=False,
    head_bias=True,
)
