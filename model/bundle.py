"""The model directory: what `export` writes and `serve` trusts, because the manifest names and hashes every file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from model.config import ConfigError, DecoderConfig
from model.tokenizer import TokenizerError, load_tokenizer, vocabulary_size

FORMAT_VERSION = 1

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"  # optional; Hugging Face's name and keys
CHAT_TEMPLATE_FILE = (
    "chat_template.jinja"  # optional, as is the next; Hugging Face's names and contents
)
SPECIAL_TOKENS_FILE = (
    "special_tokens_map.json"  # bos_token, eos_token and others that a chat template may name
)
MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
ATTENTION_GRAPH_FILE = "attention.onnx"  # the same weights; returns what attention weighs
# How the graph must be run: attention's flash path gives other bits for other ways of cutting a prompt into chunks.
GRAPH_ENVIRONMENT = {"ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}
KV_BLOCK_SIZE = (
    256  # tokens, on CUDA: PagedAttention wants a multiple of this for heads of up to 64 channels
)
DECODE_INPUT = "decode"  # where running sequences have rows of int8: the input that chooses these
Device = Literal["cpu", "cuda"]
# What a graph may be exported as; the first is the default.
PRECISIONS: dict[Device, tuple[str, ...]] = {
    "cpu": ("int8", "int4", "fp32"),
    "cuda": ("bf16", "fp16", "int8", "int4"),
}
REQUIRED_FILES = (CONFIG_FILE, TOKENIZER_FILE, GRAPH_FILE, WEIGHTS_FILE)


class BundleError(Exception):
    """A model directory that must not be served; one line with the file and the mend."""


class Verification(BaseModel):
    """What `export` measured: ONNX Runtime against PyTorch.

    max_logit_error is the largest absolute difference relative to the logits' standard deviation; greedy_agreement the
    share of PyTorch's greedy tokens that the graph would choose too, given the text so far; perplexities are on `text`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_logit_error: float
    greedy_agreement: float
    perplexity_torch: float | None = None
    perplexity_onnx: float | None = None
    text: str | None = None


# Ranges of sampling parameters, for models' defaults and for requests.
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]


class GenerationDefaults(BaseModel):
    """How requests that do not say otherwise are sampled: the model's own advice, over the API's neutral defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    typical_p: TopP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    def given(self) -> dict[str, float]:
        """The fields that are set, by name."""
        return self.model_dump(exclude_none=True)

    @classmethod
    def load(cls, path: Path) -> GenerationDefaults:
        """Read generation_config.json; none is no advice. Raises ValueError for one that is not valid."""
        return cls.model_validate_json(path.read_bytes()) if path.is_file() else cls()


class Manifest(BaseModel):
    """manifest.json. `files` maps every other file of the directory to its SHA-256, in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    architecture: str
    parameters: int
    device: Device
    precision: str
    max_model_len: int
    graph_inputs: list[str]
    graph_outputs: list[str]
    versions: dict[str, str]
    files: dict[str, str]
    source: dict[str, str | int | float] = {}
    verification: Verification

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ModelBundle:
    """A model directory that has been read and found whole.

    chat_template: Jinja's. special_tokens: the texts of bos_token, eos_token and others that it may name.
    """

    path: Path
    config: DecoderConfig
    manifest: Manifest
    tokenizer: Tokenizer
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def graph_path(self) -> Path:
        return self.path / GRAPH_FILE


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(directory: Path) -> dict[str, str]:
    """SHA-256 of every file of a model directory except the manifest itself."""
    return {
        file.name: sha256(file)
        for file in sorted(directory.iterdir())
        if file.name != MANIFEST_FILE
    }


def load_bundle(directory: Path) -> ModelBundle:
    """Read a model directory and check every file against the manifest. Raises BundleError."""
    try:
        return _load(directory)
    except OSError as error:
        raise BundleError(
            f"{error.filename or directory} cannot be read: {error.strerror}"
        ) from None


def _load(directory: Path) -> ModelBundle:
    if not directory.is_dir():
        raise BundleError(
            f"{directory} is not a directory; make one with: kvasir export CHECKPOINT --out {directory}"
        )
    manifest = _read_manifest(directory)
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise BundleError(
                f"{directory / MANIFEST_FILE} does not list {name}; export the model again"
            )
    for name, expected in manifest.files.items():
        _check_file(directory, name, expected)
    try:
        config = DecoderConfig.load(directory / CONFIG_FILE)
        tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
        generation = GenerationDefaults.load(directory / GENERATION_FILE)
        special_tokens = _load_special_tokens(directory / SPECIAL_TOKENS_FILE)
        template = directory / CHAT_TEMPLATE_FILE
        chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
    except UnicodeDecodeError:
        raise BundleError(
            f"{directory / CHAT_TEMPLATE_FILE} is not UTF-8 text; export the model again"
        ) from None
    except ValidationError as error:
        raise BundleError(
            f"{directory / GENERATION_FILE}: {_first(error)}; export the model again"
        ) from None
    except (ConfigError, TokenizerError) as error:
        raise BundleError(f"{error}; export the model again") from None
    if (known := vocabulary_size(tokenizer)) > config.vocab_size:
        raise BundleError(
            f"{directory / TOKENIZER_FILE} has token ids up to {known - 1}, but the model only {config.vocab_size} "
            "tokens; export it again with its own tokenizer"
        )
    return ModelBundle(
        directory, config, manifest, tokenizer, generation, chat_template, special_tokens
    )


def _load_special_tokens(path: Path) -> dict[str, str]:
    try:
        return parse_special_tokens(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise BundleError(f"{path} {error}; export the model again") from None


def parse_special_tokens(content: bytes) -> dict[str, str]:
    """Texts by name, of special_tokens_map.json, whose values are texts or objects that hold one as "content".

    Raises ValueError, whose message goes on after the file's name.
    """
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("does not hold a JSON object")
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise BundleError(
            f"{directory} has no {MANIFEST_FILE}, so it is not a model directory; see kvasir export"
        )
    try:
        values = json.loads(path.read_bytes())
        version = values.get("format_version") if isinstance(values, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:  # whatever else it holds
            raise BundleError(
                f"{path} has format version {version}, newer than {FORMAT_VERSION}, which this Kvasir reads; upgrade it"
            )
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise BundleError(f"{path} is damaged at {_first(error)}; export the model again") from None
    except ValueError as error:
        raise BundleError(f"{path} is damaged: {error}; export the model again") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def _check_file(directory: Path, name: str, expected: str) -> None:
    path = directory / name
    if Path(name).name != name:
        raise BundleError(
            f"{directory / MANIFEST_FILE} lists {name!r}, which is outside the directory"
        )
    if not path.is_file():
        raise BundleError(f"{path} is missing; copy it again or export the model again")
    if sha256(path) != expected:
        raise BundleError(
            f"{path} does not match its hash in {MANIFEST_FILE}; copy it again or export the model again"
        )
