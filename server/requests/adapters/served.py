"""An adapter as a served model: all is the model's own but the name, and what its folder has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvasir.model.adapters.peft import AdapterError
from kvasir.model.directory import CHAT_TEMPLATE_FILE, GENERATION_FILE, ModelDirectory
from kvasir.model.platform.files import parse_object, read_limited
from kvasir.model.records import GenerationDefaults
from kvasir.server.errors import StartupError
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.completion import Completion
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel, chat_format

_TOKENIZER_CONFIG = "tokenizer_config.json"  # of Hugging Face: older ones hold the template


class AdaptedModel(ServedModel):
    """A model with an adapter, which shares everything with it, the batch above all.

    Raises AdapterError for a template or sampling settings that cannot be used.
    """

    def __init__(self, base: ServedModel, name: str, folder: Path, bank: AdapterBank) -> None:
        self.__dict__.update(base.__dict__)
        self.name, self.parent, self._bank = name, base, bank
        self._digest = b""  # of the content that the last request had
        self.model_dir = _with_own_files(base.model_dir, name, folder)
        if self.model_dir.chat_template != base.model_dir.chat_template:
            try:
                self.chat = chat_format(self.settings, self.model_dir)
            except StartupError as error:
                raise AdapterError(f"adapter {name!r}: {error}") from None

    @property
    def fingerprint(self) -> str:
        """See ServedModel; also of the adapter's content."""
        parts = self.parent.fingerprint.encode() + self._digest
        return f"fp_{sha256(parts).hexdigest()[:12]}"

    @asynccontextmanager
    async def complete(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        """See ServedModel. The adapter is loaded first, if need be; see AdapterBank.hold."""
        self.admission.check_open()
        async with self._bank.hold(self.name) as adapter:
            self._digest = adapter.digest
            self.metrics.server.adapted(self.name)
            async with super().complete(replace(request, adapter=adapter)) as completion:
                yield completion


def _with_own_files(base: ModelDirectory, name: str, folder: Path) -> ModelDirectory:
    """Return a model directory with the template and sampling that an adapter's folder has."""
    template, generation = base.chat_template, base.generation
    try:
        if (file := folder / CHAT_TEMPLATE_FILE).is_file():
            template = read_limited(file).decode()
        elif (file := folder / _TOKENIZER_CONFIG).is_file():
            own = parse_object(read_limited(file)).get("chat_template")
            template = own if isinstance(own, str) else template
        if (file := folder / GENERATION_FILE).is_file():
            generation = _sampling(parse_object(read_limited(file)))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise AdapterError(f"adapter {name!r}: {file.name} is unusable: {reason}") from None
    return replace(base, chat_template=template, generation=generation)


def _sampling(values: dict[str, Any]) -> GenerationDefaults:
    """Return what Hugging Face's file recommends, without do_sample only a penalty."""
    names = GenerationDefaults.model_fields if values.get("do_sample") else ["repetition_penalty"]
    return GenerationDefaults.model_validate({name: values.get(name) for name in names})
