"""kvasir list and kvasir rm: the models in the cache, which were pulled and exported."""

from __future__ import annotations

import shutil
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from typer import Argument

from kvasir.commands.console.options import CacheDir, Json
from kvasir.commands.console.output import make_table, one_line_errors, show, size_in_words
from kvasir.model.directory import CONFIG_FILE, MANIFEST_FILE
from kvasir.model.platform.files import parse_object, read_limited
from kvasir.model.platform.suggestions import did_you_mean
from kvasir.server.settings import user_cache


def list_models(cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """List what serve and chat exported, and what was pulled from registries and S3.

    Files of Hugging Face's hub lie in its own cache; hf cache lists them.
    """
    with one_line_errors():
        cache = cache_dir or user_cache()
        models = [_describe(name, path) for name, path in _models(cache).items()]
    models.sort(key=itemgetter("used"), reverse=True)
    rows = [
        (one["name"], one["precision"] or "", size_in_words(one["bytes"]), one["used"])
        for one in models
    ]
    table = make_table(str(cache), ("name", "precision", "size", "last used"), rows)
    values = {"cache": str(cache), "models": models}
    show(as_json, values, table, then=("rm", "NAME") if rows else ())


def remove_models(
    names: list[str] = Argument(help="Names, as kvasir list shows them."),
    cache_dir: CacheDir = None,
) -> None:
    """Remove models from the cache; serve and pull make them again."""
    with one_line_errors():
        cache = cache_dir or user_cache()
        models = _models(cache)
        for name in names:
            if name not in models:
                hint = did_you_mean(name, models, "kvasir list shows them")
                raise ValueError(f"{cache} has no model {name!r}; {hint}")
        for name in names:
            shutil.rmtree(models[name])
            show(False, {}, f"removed {models[name]}")


def models_in(cache: Path | None) -> Path:
    """Return the folder of exported models in a cache; None is the user's."""
    return (cache or user_cache()) / "models"


def _models(cache: Path) -> dict[str, Path]:
    """Return the folders of whole models by name: exports by their own, others by their path."""
    exported = sorted(models_in(cache).glob(f"*/{MANIFEST_FILE}"))
    models = {path.parent.name: path.parent for path in exported}
    for scheme in ("oci", "s3"):
        for file in sorted((cache / scheme).rglob("*")):
            folder = file.parent
            is_model = file.name == CONFIG_FILE or file.suffix == ".gguf"
            if is_model and not any(part.endswith(".part") for part in folder.parts):
                models[folder.relative_to(cache).as_posix()] = folder
    return models


def _describe(name: str, folder: Path) -> dict[str, Any]:
    manifest = folder / MANIFEST_FILE
    about = parse_object(read_limited(manifest)) if manifest.is_file() else {}
    used = datetime.fromtimestamp(folder.stat().st_mtime).astimezone()
    sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "name": name,
        "precision": about.get("precision"),
        "bytes": sum(sizes),
        "used": used.isoformat(" ", "minutes"),
        "path": str(folder),
    }
