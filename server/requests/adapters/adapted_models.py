"""The adapters of a server as models by name, and which model each is of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from kvasir.model.adapters.config import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE, AdapterError, refuse
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import base_name, fits, read_shapes
from kvasir.model.directory import ADAPTERS_FILE
from kvasir.model.platform.files import stamp_of
from kvasir.server.errors import InvalidRequestError, StartupError, UnavailableError
from kvasir.server.requests.adapters.bank import AdapterBank
from kvasir.server.requests.adapters.served import AdaptedModel, graph_of
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.settings import Settings

logger = logging.getLogger("kvasir")

T = TypeVar("T")

_RETRY = 60  # seconds until an adapter that cannot be used may have been mended


class AdaptedModels:
    """The adapters of a server, each of one of its models.

    served: models by name, of which new versions take the places of old ones. takers: the names of
    those that take adapters; of several that an adapter fits it is of the first. model: returns a
    model by its name, and raises UnavailableError for one that could not be loaded. Raises
    StartupError for an adapter of the settings that names a model without adapters.
    """

    def __init__(
        self,
        settings: Settings,
        served: Mapping[str, ServedModel],
        takers: Sequence[str],
        model: Callable[[str], ServedModel],
    ) -> None:
        self.bank = AdapterBank(settings.adapters, settings.adapter_dir, settings.adapter_memory)
        self._takers, self._served, self._model = takers, served, model
        self._named, self._paths = settings.adapters, settings.models
        # By name: what an adapter's model was chosen by, and its name; None if there is none.
        self._parents: dict[str, tuple[object, str | None]] = {}
        for name, folder in self._named.items():
            try:
                self._parents[name] = self._key(folder), self.choose(name, folder)
            except AdapterError as error:
                raise StartupError(str(error)) from None

    @property
    def takers(self) -> list[str]:
        """The names of the models that take adapters, without those whose graphs take none."""
        served = ((name, self._served.get(name)) for name in self._takers)
        return [name for name, one in served if one is None or one.settings.has_adapters]

    def find(self, name: str) -> AdaptedModel | None:
        """Return an adapter by its name, to which Ollama's clients add ":latest"; None without.

        Raises UnavailableError for one whose folder, or whose model, cannot be used.
        """
        for each in (name, name.removesuffix(":latest")):
            if each in self._paths or (folder := self.bank.find(each)) is None:
                continue
            if (parent := self._parent(each, folder)) is not None:
                served, key = self._model(parent), (folder, self.bank.n_added)
                adapted = served.adapted  # a new version gets another, maybe meanwhile
                if adapted.get(each, (None,))[0] != key:
                    make = partial(AdaptedModel, served, each, folder, self.bank)
                    adapted[each] = key, _or_none(make)
                if isinstance(found := adapted[each][1], AdaptedModel):
                    return found
            message = f"the adapter {each!r} cannot be used; the server's log says why"
            raise UnavailableError(message, retry_after=_RETRY)
        return None

    def choose(self, name: str, folder: Path, given: str = "") -> str:
        """Return the name of the model that an adapter is of.

        That is the one that a request has given, or else the adapter's configuration names; without
        a name it is one that the adapter fits; a line of the log tells of several. Raises
        AdapterError if such a model takes none.
        """
        field, named = "base_model_name", [given] if given else []
        if not given and len(self._paths) > 1:
            field, given = "base_model_name_or_path", base_name(folder)
            named = [each for each in self._paths if self._is_called(each, given)]
        takers, unread = self.takers, self._paths.keys() - self._served.keys()
        pool = [each for each in named or takers if each in takers or each in unread]
        if not pool:
            listed = " or ".join(map(repr, takers)) or "none does"
            expected = f"a model here that takes adapters: {listed}"
            raise refuse(name, field, repr(given), expected)
        if len(pool) == 1:
            return pool[0]
        shapes = read_shapes(folder)
        fitting = [each for each in pool if self._fits(each, shapes)]
        if len(fitting) > 1:
            message = "adapter %r fits %s, and is of the first; base_model_name_or_path can choose"
            logger.warning(message, name, " and ".join(map(repr, fitting)))
        return (fitting or pool)[0]  # to load it says why it does not fit

    async def load_named(self, model: str) -> None:
        """Load a model's adapters of the settings. Raises StartupError for one that is wrong."""
        for name, folder in self._named.items():
            if self._parent(name, folder) != model:
                continue
            try:
                self.find(name)
                graph = graph_of(self._model(model))
            except UnavailableError as error:
                raise StartupError(error.message) from None
            try:
                await self.bank.add(name, folder, graph, model)
            except InvalidRequestError as error:
                if name not in self.bank.loaded:  # no request has asked for it before
                    raise StartupError(error.message) from None
            except UnavailableError:  # others' requests leave it no room: it waits for its own
                pass

    def forget(self, served: ServedModel) -> None:
        """Let the adapters of a version of a model go, which leaves memory."""
        if (engine := served.engine.engine) is not None:
            self.bank.clear(engine.adapters)

    def _parent(self, name: str, folder: Path) -> str | None:
        """Return the name of an adapter's model; None, and a line in the log, without one."""
        if (model := self.bank.models.get(name)) is not None:
            return model
        if self._parents.get(name, (None,))[0] != (key := self._key(folder)):
            self._parents[name] = key, _or_none(partial(self.choose, name, folder))
        return self._parents[name][1]

    def _key(self, folder: Path) -> object:
        """Return what an adapter's model is chosen by: the state of its files, and all layouts."""
        files, takers = (folder / ADAPTER_FILE, folder / ADAPTER_WEIGHTS_FILE), self.takers
        return folder, *map(stamp_of, files), *takers, *map(self._digest, takers)

    def _is_called(self, model: str, name: str) -> bool:
        """Return whether a model's id, its directory, or what was exported has a name."""
        served, names = self._served.get(model), [model, self._paths[model].resolve().name]
        names += [str(served.model_dir.manifest.source.get("name", ""))] if served else []
        return name.casefold() in filter(None, map(str.casefold, names))

    def _fits(self, model: str, shapes: Mapping[str, tuple[Any, ...]]) -> bool:
        if (served := self._served.get(model)) is None:
            return True  # as far as is known: it could not be read
        with suppress(OSError, ValueError):  # its directory is being replaced
            return fits(shapes, _layout(served.model_dir.path, self._digest(model)))
        return False

    def _digest(self, model: str) -> str:
        """Return the digest of a model's layout."""
        served = self._served.get(model)
        return served.model_dir.manifest.files.get(ADAPTERS_FILE, "") if served else ""


@lru_cache(maxsize=16)  # of models whose adapters are listed
def _layout(path: Path, _digest: str) -> Layout:
    return Layout.load(path / ADAPTERS_FILE)


def _or_none(make: Callable[[], T]) -> T | None:
    try:
        return make()
    except AdapterError as error:
        logger.error("%s", error)
        return None
