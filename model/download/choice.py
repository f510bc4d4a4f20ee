"""The files that Kvasir needs, among all that a store has of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import PurePosixPath

from kvasir.model.adapters.config import ADAPTER_FILE
from kvasir.model.directory import CONFIG_FILE, GRAPH_FILE, MANIFEST_FILE, TOKENIZER_FILE
from kvasir.model.download.reference import DownloadError, Reference
from kvasir.model.not_a_model import of_adapter
from kvasir.model.platform.files import parse_object

_INDEX = "model.safetensors.index.json"
# Weights are chosen apart. A number begins the folder of a sentence-transformers module.
_TEXTS = re.compile(
    r"((generation_)?config|config_sentence_transformers|modules|sentence_\w+_config|tokenizer"
    r"|tokenizer_config|special_tokens_map|\d+_\w+/config)\.json"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|\d+_\w+/model\.safetensors"
)
# What a tokenizer.json is made of.
_TOKENIZERS = ({"source.spm", "vocab.json"}, {"spiece.model"}, {"sentencepiece.bpe.model"})
MAX_FILES = 100_000  # of a model, with those that are not chosen
GGUF_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")
_NOT_SAFETENSORS = re.compile(r".+\.(bin|pt|pth|msgpack|h5|ckpt)")


def choose_files(
    reference: Reference, names: Collection[str], read: Callable[[str], bytes]
) -> list[str]:
    """Return the names of the files to pull: of a model directory, a checkpoint or a GGUF file.

    read: returns the content of a small one. Raises DownloadError for a model without them.
    """
    if len(names) > MAX_FILES:
        raise DownloadError(
            f"{reference} has more than {MAX_FILES:,} files; name a model's own place"
        )
    try:
        if reference.file is None and {MANIFEST_FILE, GRAPH_FILE} <= set(names):
            files = parse_object(read(MANIFEST_FILE)).get("files")
            chosen = [MANIFEST_FILE, *(files if isinstance(files, dict) else ())]
        else:
            chosen = _checkpoint(reference, names, read)
    except ValueError as error:
        raise DownloadError(f"{reference}: a file of it {error}") from None
    for path in map(PurePosixPath, chosen):
        if path.is_absolute() or ".." in path.parts:
            raise DownloadError(
                f"{reference} names a file {str(path)!r}, outside the model's folder"
            )
    if missing := sorted({*chosen} - {*names}):
        raise DownloadError(f"{reference} lacks {', '.join(missing)}, so it is not whole")
    return sorted({*chosen})


def _checkpoint(
    reference: Reference, names: Collection[str], read: Callable[[str], bytes]
) -> list[str]:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if "model.safetensors" in names:
        weights = ["model.safetensors"]
    elif _INDEX in names:
        shards = parse_object(read(_INDEX)).get("weight_map")
        weights = [_INDEX, *(map(str, shards.values()) if isinstance(shards, dict) else ())]
    else:
        weights = []
    if reference.file or (ggufs and not weights):
        return _gguf(reference, ggufs)
    if ADAPTER_FILE in names and not weights:
        base = parse_object(read(ADAPTER_FILE)).get("base_model_name_or_path")
        raise DownloadError(f"{reference} {of_adapter(base)}")
    if not weights:
        other = next(filter(_NOT_SAFETENSORS.fullmatch, sorted(names)), None)
        advice = f"its weights are in {other}; save them" if other else "publish its weights"
        raise DownloadError(f"{reference} has no model.safetensors: {advice} as safetensors")
    own = {TOKENIZER_FILE}
    tokenizer = next((files for files in (own, *_TOKENIZERS) if {*names} >= files), own)
    for name in (CONFIG_FILE, *tokenizer):
        if name not in names:
            raise DownloadError(
                f"{reference} has no {name}, which export needs; save the model with transformers: "
                "save_pretrained(FOLDER) of the model and of its AutoTokenizer"
            )
    return [*weights, *tokenizer, *filter(_TEXTS.fullmatch, names)]


def _gguf(reference: Reference, ggufs: list[str]) -> list[str]:
    """Return the GGUF file that is named, or the only one, with the other parts of a split one."""
    groups: dict[str, list[str]] = {}
    for name in ggufs:
        match = GGUF_PART.fullmatch(name)
        groups.setdefault(match[1] if match else name, []).append(name)
    for files in groups.values():
        if reference.file in files or (reference.file is None and len(groups) == 1):
            return files
    offered = ", ".join(files[0] for files in groups.values()) or "none"
    example = f"{reference.scheme}://{reference.place.partition('.gguf')[0]}"
    if reference.file is None:
        raise DownloadError(
            f"{reference} has several GGUF files: name one, as {example}/{ggufs[0]}; "
            f"there are {offered}"
        )
    raise DownloadError(f"{reference} does not exist; the GGUF files there are {offered}")
