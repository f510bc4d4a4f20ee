"""One type of transformers: from a tiny random checkpoint to served tokens, or to a refusal."""

from __future__ import annotations

import json
import logging
import re
import signal
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import pytest
import torch
from torch import nn

from kvasir.export.directory import export_checkpoint
from kvasir.kernels.library import FILE, Library
from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.model.config import TransformerConfig
from kvasir.model.directory import CONFIG_FILE, GRAPH_FILE, PRECISIONS
from kvasir.model.importing.families.decoders import DECODERS, WITH_VISION
from kvasir.model.importing.families.missing import MISSING
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.packed import open_decoder
from kvasir.server.engine.sampling.params import SamplingParams
from tests.kit.engine_driver import make_sequence, run_to_end
from tests.kit.families import FAMILIES, LENGTH, WINDOW
from tests.kit.huggingface_checkpoints import make_uneven_model, save_checkpoint
from tests.kit.traces import trace_networks_once

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # and the class of each
PROMPTS = (7, 60, 150)  # tokens
assert max(PROMPTS) > WINDOW
N_NEW = 16
_LONGEST = 256
_WIDTH = 0.1  # of matrices: in wider random models, routers choose by differences that int8 rounds
_MOST_SECONDS = 300
_PRECISIONS = ("fp32", *(name for name in PRECISIONS["cpu"] if name != "fp32"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a type: equal, refused, not yet, different or failed, and a sentence.

    mean_kl: of the exports whose weights are rounded, by precision. seconds: of a CPU.
    """

    what: str
    why: str = ""
    mean_kl: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.what in ("different", "failed")


def is_read(kind: str) -> bool:
    """Tell whether a family computes checkpoints of a type."""
    return _saved_as(kind) in {*DECODERS, *WITH_VISION}


def _saved_as(kind: str) -> str:
    of_config: str = transformers.CONFIG_MAPPING[kind].model_type  # GPT-SW3 is saved as GPT-2
    return of_config


def try_alone(kind: str) -> Outcome:
    """Try a type as the only work of this process, which ends if the type hangs."""
    signal.alarm(_MOST_SECONDS)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    messages: Any = transformers.utils.logging
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    with TemporaryDirectory() as folder:
        trace_networks_once(pytest.MonkeyPatch(), Path(folder))
        return replace(try_type(kind), seconds=process_time())


def try_type(kind: str) -> Outcome:
    """Try a type of transformers; any exception is an outcome."""
    try:
        with TemporaryDirectory() as folder:
            return _try(kind, Path(folder))
    except Exception as error:  # of whatever class transformers may add
        return Outcome("failed", f"{type(error).__name__}: {_one_line(error)}")


def _try(kind: str, folder: Path) -> Outcome:
    if not is_read(kind):
        return _refusal(kind, folder)
    saved_as = _saved_as(kind)
    values = next((values for of, values in FAMILIES.values() if of == saved_as), None)
    if values is None:
        return Outcome("failed", "tests/kit/families.py has no configuration of it")
    torch.manual_seed(1)
    model: Any = make_uneven_model(saved_as, _stretched(values), _WIDTH)
    prompts = [torch.randint(LENGTH * 3, (length,)).tolist() for length in PROMPTS]
    expected = [_generate(model, prompt) for prompt in prompts]
    save_checkpoint(folder / "checkpoint", model)
    mean_kl: dict[str, float] = {}
    for precision in _PRECISIONS:
        out = folder / precision
        manifest, _ = export_checkpoint(folder / "checkpoint", out, precision=precision)
        answers = _serve(out, load_checkpoint(folder / "checkpoint").config, prompts)
        if precision != "fp32":
            assert manifest.verification.mean_kl is not None
            mean_kl[precision] = manifest.verification.mean_kl
        elif answers != expected:
            pairs = zip(PROMPTS, answers, expected, strict=True)
            lengths = ", ".join(str(length) for length, ours, theirs in pairs if ours != theirs)
            return Outcome("different", f"greedy tokens after {lengths} tokens are others")
    return Outcome("equal", "", mean_kl)


def _refusal(kind: str, folder: Path) -> Outcome:
    """Return the outcome of a type that no family computes, of which config.json tells."""
    values = {"model_type": kind, "architectures": [TYPES[kind]]}  # defaults may not be valid
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    try:
        load_checkpoint(folder)
    except CheckpointError as error:
        told = re.sub(rf".*of model_type '{kind}'[,;] |; Kvasir does.*", "", _one_line(error))
        told = re.sub("^which ", "it ", told)
        refused = kind in MISSING or told.startswith("supported")
        return Outcome("refused" if refused else "not yet", told if refused else "")
    return Outcome("failed", f"{CONFIG_FILE} alone was accepted")


def _stretched(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of the tests with room for the longest prompt."""
    return {
        key: _stretched(value)
        if isinstance(value, dict)
        else _LONGEST
        if value == LENGTH
        else value
        for key, value in values.items()
    }


def _generate(model: nn.Module, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    whole: Any = model
    whole.generation_config.eos_token_id = None
    generated = whole.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=N_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return list(generated[0, len(prompt) :].tolist())


def _serve(directory: Path, config: TransformerConfig, prompts: list[list[int]]) -> list[list[int]]:
    """Return greedy tokens after prompts, which run beside each other, and in chunks."""
    library = Library(FILE).resolved() if FILE.exists() else None
    graph = directory / GRAPH_FILE
    runner = open_decoder(
        graph,
        config,
        library,
        max_num_seqs=4,
        threads=1,
        kv_cache_bytes=2**26,
        prefix_cache_bytes=0,
    )
    params = SamplingParams(max_tokens=N_NEW, temperature=0.0, ignore_eos=True)
    sequences = [make_sequence(i, prompt, params) for i, prompt in enumerate(prompts)]
    results = run_to_end(Engine(runner, chunk_size=64), sequences)
    return [results[i].token_ids for i in range(len(prompts))]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
