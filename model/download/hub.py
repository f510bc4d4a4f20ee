"""Models of Hugging Face's hub, in its own cache, which transformers and others share.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.model.download.choice import choose_files
from kvasir.model.download.reference import DownloadError, Reference
from kvasir.model.download.transfer import (
    CHUNK,
    INDEX_BYTES,
    LONGEST_WAIT,
    Pull,
    digest,
    read_whole,
)
from kvasir.model.platform.progress import Progress, interruptible

_LEAST_SPEED = 2**14  # bytes a second of a whole file: the library does not show its chunks


def find_hub_model(reference: Reference) -> tuple[str, Pull]:
    """Return the revision that the hub has now, or offline the cache. Raises DownloadError."""
    import huggingface_hub as hub  # noqa: PLC0415  of the extra hub
    from huggingface_hub import constants, errors  # noqa: PLC0415

    revision = reference.revision
    if constants.HF_HUB_OFFLINE:
        missing = (
            f"{reference} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
            f"is set; run once without it: kvasir pull {reference}"
        )
        name = reference.name
        try:
            folder = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            raise DownloadError(missing) from None
        if reference.file is not None and not (folder / reference.file).is_file():
            raise DownloadError(missing)
        return folder.name, partial(_choose_cached, reference, folder)
    hooks = hub.get_session().event_hooks["response"]
    if _read_small not in hooks:
        hooks.append(_read_small)
    with _in_words(reference):
        info = hub.HfApi().model_info(reference.name, revision=revision, files_metadata=True)
    files = info.siblings or ()
    hashes = {f.rfilename: f.lfs.sha256 if f.lfs else f.blob_id or "" for f in files}
    sizes = {f.rfilename: f.size or 0 for f in files}
    return info.sha or "", partial(_pull, reference, info.sha or "", sizes, hashes)


def _choose_cached(reference: Reference, folder: Path, _: Progress) -> tuple[Path, list[str]]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    return folder, choose_files(reference, names, lambda name: (folder / name).read_bytes())


def _pull(
    reference: Reference, revision: str, sizes: dict[str, int], hashes: dict[str, str], _: Progress
) -> tuple[Path, list[str]]:
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415  of the extra hub

    if not sys.stderr.isatty():
        disable_progress_bars()
    with _in_words(reference):

        def read(name: str) -> bytes:
            if sizes[name] > INDEX_BYTES:
                raise DownloadError(f"{reference}: {name} has {sizes[name]:,} bytes")
            return _download(reference, name, sizes[name], revision).read_bytes()

        chosen = choose_files(reference, hashes, read)
        for name in chosen:
            path = _download(reference, name, sizes[name], revision)
        folder = path.parents[name.count("/")]
        # By the name of its branch or tag, which the cache then finds offline.
        _download(reference, name, sizes[name], reference.revision)
    wrong = [name for name in chosen if not _matches(folder / name, hashes[name])]
    for name in wrong:
        (folder / name).resolve().unlink()
    if wrong:
        raise DownloadError(
            f"{reference}: {', '.join(wrong)} does not match its hash; run this again"
        )
    return folder, chosen


def _download(reference: Reference, name: str, size: int, revision: str | None) -> Path:
    """Return a file in the hub's cache. Raises DownloadError for more than its size."""
    import huggingface_hub as hub  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class Bounded(tqdm):
        n_bytes = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.n_bytes += int(n or 0)
            if self.n_bytes > size:
                raise DownloadError(f"{reference}: {name} has more than its {size:,} bytes")
            return bool(super().update(n))

        def update_transfer(self, *_: object, **__: object) -> None:
            """Ignore what the network brings: only what reaches the file counts."""

        set_transfer_postfix_str = update_transfer

    ask = partial(hub.hf_hub_download, reference.name, name, revision=revision)
    longest = LONGEST_WAIT + size / _LEAST_SPEED
    return Path(interruptible(lambda _: ask(tqdm_class=Bounded), longest))


def _read_small(response: Any) -> None:
    """Read a response that is no file, which the library would read without a limit."""
    if response.status_code not in (200, 206) or response.url.path.startswith("/api/"):
        chunks = response.iter_bytes(CHUNK)
        response._content = read_whole(str(response.url), chunks, INDEX_BYTES)


def _matches(path: Path, expected: str) -> bool:
    """Compare a file with the hub's hash: git's own or, of a larger file, SHA-256."""
    if len(expected) == 64:
        return digest(path, "sha256") == expected
    return digest(path, "sha1", b"blob %d\0" % path.stat().st_size) == expected


@contextmanager
def _in_words(reference: Reference) -> Iterator[None]:
    """Make errors of the hub and of the connection a DownloadError."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except errors.GatedRepoError:
        cause = "is gated: accept its terms on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        cause = "is not on the hub, or private; check the name, and set HF_TOKEN for a private one"
    except errors.RevisionNotFoundError:
        cause = f"has no revision {reference.revision!r}; name a branch, a tag or a commit"
    except DownloadError:
        raise
    except Exception as error:  # the library's connections raise kinds of their own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        cause = f"cannot be pulled: {first}; run this again, and it goes on from there"
    else:
        return
    raise DownloadError(f"{reference} {cause}")
