"""The revision of a model in a store, and its files on this machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvasir.model.download.choice import choose_files
from kvasir.model.download.hub import find_hub_model
from kvasir.model.download.oci import list_oci
from kvasir.model.download.reference import DownloadError, Reference
from kvasir.model.download.s3 import list_s3
from kvasir.model.download.transfer import INDEX_BYTES, Pull, in_time, read_whole, transfer
from kvasir.model.platform.progress import Progress, interruptible

_LIST_SECONDS = 120.0
_LISTS = {"oci": list_oci, "s3": list_s3}


@dataclass(frozen=True, slots=True)
class Found:
    """A model as it is in its store now; revision: a hash that no other content has."""

    reference: Reference
    revision: str
    _pull: Pull

    def pull(self, progress: Progress) -> Path:
        """Return its folder, or its GGUF file, whole and verified. Raises DownloadError."""
        folder, names = self._pull(progress)
        return folder / names[0] if names[0].endswith(".gguf") else folder

    def key(self, *more: str) -> str:
        """Return a folder's name for what is made of it with `more`."""
        text = " ".join((str(self.reference), self.revision, *more))
        stem = self.reference.name.replace("/", "--")
        return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def find(reference: Reference, cache: Path) -> Found:
    """Ask the store for a model's revision and files; `cache` keeps what the hub's does not.

    Raises DownloadError, and ModuleNotFoundError for an extra that is not installed.
    """
    try:
        if reference.scheme == "hf":
            revision, pull_hub = interruptible(lambda _: find_hub_model(reference), _LIST_SECONDS)
            return Found(reference, revision, pull_hub)
        revision, files = interruptible(
            lambda _: _LISTS[reference.scheme](reference), _LIST_SECONDS
        )
    except TimeoutError as error:
        raise DownloadError(f"{reference} cannot be listed: {error}; try again later") from None
    folder = cache / reference.scheme / reference.place.replace(":", "_") / revision

    def read(name: str) -> bytes:
        return read_whole(f"{reference}, {name}", in_time(files[name].read(0)), INDEX_BYTES)

    def pull(progress: Progress) -> tuple[Path, list[str]]:
        chosen = choose_files(reference, files, read)
        transfer({name: files[name] for name in chosen}, folder, progress)
        return folder, chosen

    return Found(reference, revision, pull)
