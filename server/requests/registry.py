"""The models of a server by name: which serves a request, and the phases of their common life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Literal

from kvasir.model.directory import ModelDirectory
from kvasir.model.platform.machine import available_memory
from kvasir.model.platform.suggestions import did_you_mean
from kvasir.server.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    StartupError,
    UnavailableError,
)
from kvasir.server.requests.adapters.adapted_models import AdaptedModels
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.adapters.served import (
    WITHOUT_ADAPTERS,
    AdaptedModel,
    takers_of_adapters,
)
from kvasir.server.requests.admission.answers import AnswerMemory
from kvasir.server.requests.admission.queue import Phase
from kvasir.server.requests.loading.folder_model import Build, FolderModel
from kvasir.server.requests.loading.loader import ModelLoader
from kvasir.server.requests.served_model import ServedModel, Task
from kvasir.server.requests.text_worker import TextWorker
from kvasir.server.settings import Settings
from kvasir.server.telemetry.server_metrics import ServerMetrics
from kvasir.server.telemetry.start_clock import StartClock

logger = logging.getLogger("kvasir")

# unloaded: the next request loads it. failed: not loaded. unhealthy: its engine failed or hangs.
ModelState = Literal["unloaded", "loading", "ready", "draining", "unhealthy", "failed"]
_PHASES: dict[Phase, ModelState] = {
    Phase.LOADING: "loading",
    Phase.READY: "ready",
    Phase.DRAINING: "draining",
}
# huggingface_hub and TGI's clients use these names for whatever a server serves.
_ANY_MODEL = (None, "dummy", "tgi")
_FAILED_RETRY = 60  # seconds
# The purpose of a model, and paths for it.
_PURPOSES: dict[Task, tuple[str, str]] = {
    "generate": ("continues texts", "/v1/completions or /v1/chat/completions"),
    "embed": ("makes vectors of texts", "/v1/embeddings or /similarity"),
    "classify": ("scores texts", "/v1/classify, /predict or /v1/rerank"),
}


class ModelRegistry:
    """The models of a server. One that cannot be loaded leaves the others as they are.

    model_dirs: each model's, or the error of its directory. Raises StartupError if all are errors.
    """

    def __init__(
        self, settings: Settings, model_dirs: Mapping[str, ModelDirectory | StartupError]
    ) -> None:
        self.settings = settings
        self.names = tuple(model_dirs)
        self.metrics = ServerMetrics()
        self.text_worker = TextWorker()
        self.answers = AnswerMemory.pots(self.text_worker)
        self.served: dict[str, ServedModel] = {}
        self.failures: dict[str, StartupError] = {}  # of models that could not be loaded
        self.on_load_failure: Callable[[StartupError], None] = logger.error
        staying = [name for name in model_dirs if name not in settings.folder_models]
        takers = takers_of_adapters(model_dirs, staying)
        budget = settings.models_memory or available_memory()
        kv_bytes = settings.kv_cache_memory or budget // (2 * len(model_dirs))
        in_folder = {"kv_cache_memory": kv_bytes, "prefix_dir": None}
        self._in_folder: dict[str, FolderModel] = {}
        for name, model_dir in model_dirs.items():
            try:
                if isinstance(model_dir, StartupError):
                    raise model_dir
                own = settings if name in takers else settings.model_copy(update=WITHOUT_ADAPTERS)
                own = own if name in staying else own.model_copy(update=in_folder)
                served = ServedModel(
                    own, model_dir, name, self.metrics, self.text_worker, self.answers
                )
                self.served[name] = served
                if name not in staying:
                    cache = settings.prefix_cache_memory
                    n = kv_bytes + (kv_bytes // 10 if cache is None else cache)
                    self._in_folder[name] = FolderModel(served, n, self.served)
            except StartupError as error:
                self._fail(name, error)
        if not self.served:
            raise next(iter(self.failures.values()))
        self.loader = ModelLoader(
            self._in_folder.values(),
            budget=budget,
            free=available_memory,
            keep_alive=settings.keep_alive,
            max_waiting=settings.queue_limit,
        )
        if self._in_folder:
            self.metrics.show_models(self.loader.figures, self.loader.names)
        self.adapted: AdaptedModels | None = None
        if settings.has_adapters and not takers:
            raise StartupError("no model of the folder takes adapters; name one, or leave them out")
        if settings.has_adapters and not self.served.keys().isdisjoint(takers):
            self.adapted = AdaptedModels(settings, self.served, takers, self._model)
            self.metrics.show_adapters(self.adapted.bank.figures)
            for model in self._in_folder.values():
                model.on_unload = self.adapted.forget

    def find(self, name: str | None = None, *tasks: Task, must_choose: bool = False) -> ServedModel:
        """Return the named model or, without a name, of the first for the tasks.

        must_choose: of several models one has to be named. Raises InvalidRequestError for a missing
        name or a model of no such task, and the errors of `named`.
        """
        fit = [name for task in tasks for name, one in self.served.items() if one.task == task]
        if name in _ANY_MODEL and name not in self.names:
            if must_choose and len(self.names) > 1:
                names = ", ".join(map(repr, self.served))
                raise InvalidRequestError(f"model is needed: one of {names}", param="model")
            name = (fit or self.names)[0]
        served = self.named(name or "")
        if tasks and served.task not in tasks:
            does, paths = _PURPOSES[served.task]
            wanted = " or ".join(_PURPOSES[task][0] for task in tasks)
            other = "".join(f", such as {name!r}" for name in fit[:1])
            message = (
                f"the model {name!r} {does}: use {paths}; this path is for a model that "
                f"{wanted}{other}"
            )
            raise InvalidRequestError(message, param="model")
        return served

    def named(self, name: str) -> ServedModel:
        """Return a model by its name, to which Ollama's clients add ":latest".

        Raises ModelNotFoundError for an unknown name, and UnavailableError for a model that could
        not be loaded.
        """
        if (adapter := self.adapter(name)) is not None:
            return adapter
        return self._model(name if name in self.names else name.removesuffix(":latest"))

    def _model(self, name: str) -> ServedModel:
        if name in self.failures:
            raise UnavailableError(
                f"the model {name!r} could not be loaded; the server's log says why",
                retry_after=_FAILED_RETRY,
            )
        if name not in self.served:
            known = [*self.served]
            if self.bank is not None:  # to list its folder takes long
                known = list(dict.fromkeys([*known, *self.bank.folders, *self.bank.loaded]))
            names = " and ".join(map(repr, known))
            listed = f"{names} {'is' if len(known) == 1 else 'are'}"
            raise ModelNotFoundError(
                f"the model {name!r} is not served here; {did_you_mean(name, known, listed)}",
                param="model",
            )
        return self.served[name]

    @property
    def bank(self) -> AdapterBank | None:
        """The adapters in memory; None if requests may name none."""
        return None if self.adapted is None else self.adapted.bank

    def adapter(self, name: str) -> AdaptedModel | None:
        """Return an adapter by its name; see AdaptedModels.find."""
        return None if self.adapted is None else self.adapted.find(name)

    @property
    def adapters(self) -> list[AdaptedModel]:
        """All adapters, without those that cannot be used."""
        found = list[AdaptedModel]()
        for name in self.bank.names() if self.bank else ():
            with suppress(UnavailableError):
                found += filter(None, [self.adapter(name)])
        return found

    @property
    def usable(self) -> list[ServedModel]:
        """The models, without those that could not be loaded."""
        return [served for name, served in self.served.items() if name not in self.failures]

    @property
    def states(self) -> dict[str, ModelState]:
        """The state of each model."""
        states: dict[str, ModelState] = dict.fromkeys(self.names, "failed")
        for name, served in self.served.items():
            if name not in self.failures:
                phase = _PHASES[served.admission.phase]
                if phase == "loading" and name in self.loader.names:
                    phase = self.loader.state(name)
                states[name] = phase if served.engine.is_healthy else "unhealthy"
        return states

    @property
    def staying_states(self) -> dict[str, ModelState]:
        """The states of the models that are loaded from the start."""
        names = self.loader.names
        return {name: state for name, state in self.states.items() if name not in names}

    def retry_after(self) -> int:
        """Estimate the seconds until a sequence ends, of the slowest model."""
        return max(
            served.admission.retry_after(1, served.engine.snapshot())
            for served in self.served.values()
        )

    async def start(self, build: Build, clock: StartClock) -> None:
        """Load the models in turn, and let those of the folder be loaded.

        If none can be, an error goes to `on_load_failure`.
        """
        for model in self._in_folder.values():
            model.build = build
        staying = {n: one for n, one in self.served.items() if n not in self._in_folder}
        for name, served in staying.items():
            try:
                await served.start(partial(build, served, clock), clock)
                if self.adapted is not None and name in self.adapted.takers:
                    await self.adapted.load_named(name)
            except Exception as error:
                self._fail(name, error)
        if len(self.failures) == len(self.names):
            self.on_load_failure(self.failures[self.names[-1]])

    @property
    def _versions(self) -> list[ServedModel]:
        """The models, and former versions of them that requests still use."""
        former = (each for model in self._in_folder.values() for each in model.former)
        return [*self.served.values(), *former]

    async def drain(self) -> None:
        """Drain all models at once; see ServedModel."""
        self.loader.close()
        await asyncio.gather(*(served.drain() for served in self._versions))

    async def close(self) -> None:
        """End all sequences, threads and processes, unless an engine hangs."""
        self.loader.close()
        models = self._versions
        await asyncio.gather(*(served.engine.stop() for served in models))
        for served in models:
            served.grammars.close()
        self.text_worker.shutdown(wait=False, cancel_futures=True)

    def _fail(self, name: str, error: Exception) -> None:
        if not isinstance(error, StartupError):
            reason = " ".join(str(error).split())
            path = self.served[name].model_dir.path
            error = StartupError(f"{path} cannot be served: {reason}")
        self.failures[name] = error
        self.metrics.failed(name, is_failed=True)
        if len(self.names) > 1:
            logger.error("%s", error, extra={"fields": {"model": name}})
