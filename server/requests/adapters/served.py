"""An adapter as a served model: all is the model's own but the name, and what its folder has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvasir.model.adapters.config import AdapterError
from kvasir.model.directory import (
    ADAPTERS_FILE,
    GENERATION_FILE,
    ModelDirectory,
    parse_template,
    read_extra_files,
)
from kvasir.model.platform.files import parse_object
from kvasir.model.platform.suggestions import install_command
from kvasir.model.records import GenerationDefaults
from kvasir.server.engine.adapters.loaded import Adapter, GraphAdapters
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import StartupError, UnavailableError
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.completion import Completion
from kvasir.server.requests.request import CompletionRequest, EmbeddingRequest
from kvasir.server.requests.served_model import ServedModel, chat_format

WITHOUT_ADAPTERS = {"adapter": None, "adapter_dir": None}  # settings
_RETRY = 5  # seconds until a model may have been loaded


class AdaptedModel(ServedModel):
    """A model with an adapter, which shares everything with it, the batch above all.

    Raises AdapterError for a template or sampling settings that cannot be used.
    """

    def __init__(self, base: ServedModel, name: str, folder: Path, bank: AdapterBank) -> None:
        self.parent, self.name, self._bank = base, name, bank
        self._digest = b""  # of the content that the last request had
        self.model_dir = _with_own_files(base.model_dir, name, folder)
        if self.model_dir.chat_template != base.model_dir.chat_template:
            try:
                self.chat = chat_format(self.settings, replace(self.model_dir, path=folder))
            except StartupError as error:
                raise AdapterError(f"adapter {name!r}: {error}") from None

    def __getattr__(self, name: str) -> Any:
        """Return a part of the model: its engine, admission, settings and all else."""
        # A property of its own has failed, or nothing is set yet, as in a copy.
        if name == "parent" or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises that error
        return getattr(self.parent, name)

    @property
    def fingerprint(self) -> str:
        """See ServedModel; also of the adapter's content."""
        parts = self.parent.fingerprint.encode() + self._digest
        return f"fp_{sha256(parts).hexdigest()[:12]}"

    @asynccontextmanager
    async def complete(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        """See ServedModel. The adapter is loaded first, if need be; see AdapterBank.hold."""
        async with (
            self.holding() as adapter,
            super().complete(replace(request, adapter=adapter)) as completion,
        ):
            yield completion

    async def embed(self, request: EmbeddingRequest) -> list[Floats]:
        """See ServedModel, and `complete`."""
        async with self.holding() as adapter:
            return await super().embed(replace(request, adapter=adapter))

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[Adapter]:
        """Keep the adapter in memory until the block is left; see AdapterBank.hold."""
        self.admission.check_open()
        async with self._bank.hold(self.name, graph_of(self.parent)) as adapter:
            self._digest = adapter.digest
            self.metrics.server.adapted(self.name)
            yield adapter


def graph_of(served: ServedModel) -> GraphAdapters:
    """Return how a model's engine takes adapters. Raises UnavailableError if it does not, yet."""
    engine = served.engine.engine
    if engine is None or engine.adapters is None:
        reason = "is being loaded" if engine is None else "takes no adapters; the log says why"
        raise UnavailableError(f"the model {served.name!r} {reason}", retry_after=_RETRY)
    return engine.adapters


def takers_of_adapters(
    model_dirs: Mapping[str, ModelDirectory | StartupError], staying: Sequence[str]
) -> list[str]:
    """Return the names of the models that take adapters, first those that write text.

    staying: those that are no folder's. If none takes some, it is the first of these, whose load
    says why.
    """
    found, last = list[str](), list[str]()
    for name, one in model_dirs.items():
        if isinstance(one, StartupError):
            takes = name in staying  # it may, and may write text
        else:
            takes = not why_no_adapters(one)
            last += [name] if one.config.pooling else []
        found += [name] if takes else []
    names = sorted(found or staying, key=last.__contains__)
    return names if found else names[:1]


def why_no_adapters(model_dir: ModelDirectory) -> str:
    """Return why a model takes no adapters; nothing if it takes some."""
    config, manifest = model_dir.config, model_dir.manifest
    if manifest.device != "cpu":
        return f"it was exported for {manifest.device}; export it for the CPU"
    if config.n_experts or config.recurrence is not None:
        kind = "experts" if config.n_experts else "recurrent layers"
        return f"it has {kind}; serve a model without"
    if find_spec("onnx") is None:
        return f"that needs onnx; install it with: {install_command('cpu')}"
    if ADAPTERS_FILE not in manifest.files:
        return (
            f"it has no {ADAPTERS_FILE}, being of an older Kvasir or a GGUF file; export the model "
            "again, from its Hugging Face folder"
        )
    return ""


def _with_own_files(base: ModelDirectory, name: str, folder: Path) -> ModelDirectory:
    """Return a model directory with the template and sampling that an adapter's folder has."""
    try:
        files = read_extra_files(folder)
        template, _ = parse_template(files)
        generation = base.generation
        if GENERATION_FILE in files:  # Hugging Face's: without do_sample only the penalty counts
            values = parse_object(files[GENERATION_FILE])
            samples = bool(values.get("do_sample"))
            names = GenerationDefaults.model_fields if samples else ["repetition_penalty"]
            generation = GenerationDefaults(**{each: values.get(each) for each in names})
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise AdapterError(f"adapter {name!r}: its files are unusable: {reason}") from None
    return replace(base, chat_template=template or base.chat_template, generation=generation)
