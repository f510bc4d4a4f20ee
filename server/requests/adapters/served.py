"""An adapter as a served model: all is the model's own but the name, and what its folder has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
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
from kvasir.model.records import GenerationDefaults
from kvasir.server.engine.adapters.loaded import Adapter
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.errors import StartupError
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.completion import Completion
from kvasir.server.requests.request import CompletionRequest, EmbeddingRequest
from kvasir.server.requests.served_model import ServedModel, chat_format


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
        engine = self.parent.engine.engine
        graph = None if engine is None else engine.adapters
        async with self._bank.hold(self.name, graph) as adapter:
            self._digest = adapter.digest
            self.metrics.server.adapted(self.name)
            yield adapter


def model_of_adapters(
    model_dirs: Mapping[str, ModelDirectory | StartupError], staying: Sequence[str]
) -> str:
    """Return the name of the first model that writes text, or of the first, if none does.

    staying: those that are named, if there are some; else it is one of a folder that takes
    adapters. Empty without one.
    """
    names = staying or [name for name, one in model_dirs.items() if _takes_adapters(one)]
    found = ((name, model_dirs[name]) for name in names)
    # One that cannot be loaded may write text.
    writers = [n for n, one in found if isinstance(one, StartupError) or not one.config.pooling]
    return next(iter([*writers, *names]), "")


def _takes_adapters(model_dir: ModelDirectory | StartupError) -> bool:
    if isinstance(model_dir, StartupError):
        return False
    has_other_layers = model_dir.config.n_experts or model_dir.config.recurrence
    return ADAPTERS_FILE in model_dir.manifest.files and not has_other_layers


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
