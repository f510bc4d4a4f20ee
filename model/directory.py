"""The model directory: `export` writes it, `serve` trusts it; its manifest hashes every file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter
from tokenizers import Tokenizer

from kvasir.model.config import TransformerConfig
from kvasir.model.not_a_model import find_mistake
from kvasir.model.onnx.external_data import external_files
from kvasir.model.platform.files import parse_object, read_limited
from kvasir.model.platform.suggestions import first_problem
from kvasir.model.records import EmbeddingDefaults, GenerationDefaults, Record, Verification
from kvasir.model.tokenizer import load_tokenizer

FORMAT_VERSION = 1

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
# Optional, with Hugging Face's names and contents. The third holds bos_token, eos_token and others
# that a chat template may name.
GENERATION_FILE = GenerationDefaults.file
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
EMBEDDING_FILE = EmbeddingDefaults.file
EXAMPLES_FILE = "examples.json"  # prompts: a list of texts that were held out
MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "model.onnx"
ENCODER_GRAPH_FILE = "encoder.onnx"  # of an encoder-decoder, whose decoder is GRAPH_FILE
WEIGHTS_FILE = "model.onnx.data"
ATTENTION_GRAPH_FILE = "attention.onnx"  # the same weights; also returns attention's weights
HEAD_MASK_INPUT = "head_mask"  # of that graph
LENS_OUTPUT, ROWS_OUTPUT = "lens", "rows"  # of that graph, if it has logits
ADAPTERS_FILE = "adapters.safetensors"  # how adapters fit the graph: see `model.adapters.layout`
REQUIRED_FILES = (CONFIG_FILE, TOKENIZER_FILE, GRAPH_FILE, WEIGHTS_FILE)
_GRAPHS = frozenset({GRAPH_FILE, ENCODER_GRAPH_FILE, ATTENTION_GRAPH_FILE})
EXTRA_FILES = (
    *(CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE),
    *(EMBEDDING_FILE, EXAMPLES_FILE),
)
_MOST_EXTRA = 2**22  # bytes of each
_Prompts = TypeAdapter(list[str])

# Tokens, on a GPU: PagedAttention wants a multiple of this for heads of up to 64 channels.
KV_BLOCK_SIZE = 256
# A graph's keys and values: each input {name}.{layer}.key or .value is written to the output
# {name}.{layer}.… Those of prompts exist where running sequences have int8 ones.
CACHE_OUTPUTS = {"past_key_values": "present", "prompt_key_values": "prompt_present"}
# The states of recurrent layers: each input {name}.{layer}.{part} becomes the output of that name,
# after the first tokens of each row, as many as the input NEW_TOKENS_INPUT says.
STATE_OUTPUTS = {"past_states": "present_states"}
NEW_TOKENS_INPUT = "n_new"
CANDIDATES_OUTPUT = "candidates"  # of a graph that chooses the likeliest tokens of each row
INVERSE_TEMPERATURES_INPUT = "inverse_temperatures"  # of the same: [rows, 1]
DECODE_INPUT = "decode"  # chooses the int8 keys and values of running sequences, where there are

Device = Literal["cpu", "cuda", "webgpu"]
# The precisions of a graph; the first is the default.
PRECISIONS: dict[Device, tuple[str, ...]] = {
    "cpu": ("int8", "int4", "fp32"),
    "cuda": ("bf16", "fp16", "int8", "int4"),
    "webgpu": ("fp16", "int8", "int4"),
}


class ModelDirectoryError(Exception):
    """A model directory that must not be served; one line with the file and the remedy."""


class Manifest(Record):
    """The contents of manifest.json; files: the SHA-256, in hex, of every other file by name.

    calibration: the text by which outliers were smoothed, its tokens and their SHA-256, and at how
    many places of how many. in_8_bits: weights of int4 that keep them. fits_16_bits: in the
    encoder's graph two neighbouring products of uint8 and int8 sum to less than 2^15, so every CPU
    computes them exactly. digest: of its answers, if they are the same bits on every CPU; see
    `server.engine.digest`.
    """

    format_version: int
    architecture: str
    parameters: int
    device: Device
    precision: str
    max_model_len: int
    fits_16_bits: bool = False
    graph_inputs: list[str]
    graph_outputs: list[str]
    versions: dict[str, str]
    files: dict[str, str]
    source: dict[str, str | int | float] = Field(default_factory=dict)
    calibration: dict[str, str | int] | None = None
    in_8_bits: list[str] = Field(default_factory=list)
    digest: str | None = None
    verification: Verification

    def save(self, path: Path) -> None:
        """Write manifest.json."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model directory that was found whole; its template may use special_tokens by name."""

    path: Path
    config: TransformerConfig
    manifest: Manifest
    tokenizer: Tokenizer
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    embedding: EmbeddingDefaults = field(default_factory=EmbeddingDefaults)
    examples: Sequence[str] = ()  # prompts to try it with

    @property
    def default_sampling(self) -> GenerationDefaults:
        """The model's recommended sampling; with an encoder the likeliest text, unless it says."""
        if self.config.encoder is None or self.generation.temperature is not None:
            return self.generation
        return self.generation.model_copy(update={"temperature": 0.0})

    @property
    def graph_path(self) -> Path:
        """The path of model.onnx."""
        return self.path / GRAPH_FILE


def cache_names(name: str, n_layer: int) -> list[str]:
    """Return a graph's names for keys and values, as "present.0.key"; name: of CACHE_OUTPUTS."""
    return [f"{name}.{layer}.{kind}" for layer in range(n_layer) for kind in ("key", "value")]


def state_names(config: TransformerConfig) -> list[str]:
    """Return a graph's inputs for states, as "past_states.3.convolution"."""
    return [f"past_states.{i}.{part}" for i in config.recurrent_layers for part in config.states]


def present_name(past: str) -> str:
    """Return the output of a graph that an input for keys, values or a state becomes."""
    kind, _, place = past.partition(".")
    return f"{(CACHE_OUTPUTS | STATE_OUTPUTS)[kind]}.{place}"


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the folder of a checkpoint: the directory itself, or a training run's newest step."""
    if (directory / CONFIG_FILE).is_file():
        return directory
    # A suffix marks a step that is being written.
    steps = sorted(path for path in directory.glob("step-*") if not path.suffix)
    return steps[-1] if steps else None


def sha256(path: Path) -> str:
    """Return a file's SHA-256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a model directory except the manifest."""
    files = sorted(file for file in directory.iterdir() if file.name != MANIFEST_FILE)
    return {file.name: sha256(file) for file in files}


def load_model_dir(directory: Path) -> ModelDirectory:
    """Read a model directory, and check every file against the manifest.

    Raises ModelDirectoryError.
    """
    if not directory.is_dir():
        problem = f"{directory} is not a directory; make one with: {_export_command(directory)}"
        if not directory.exists():
            command = _export_command("CHECKPOINT", directory)
            problem = f"{directory} does not exist; make one with: {command}"
        raise ModelDirectoryError(find_mistake(directory) or problem)
    try:
        manifest = _read_manifest(directory / MANIFEST_FILE)
        _check_files(directory, manifest.files)
        for name in _GRAPHS & manifest.files.keys():
            _check_external_data(directory / name, manifest)
        config, tokenizer = load_config_and_tokenizer(directory)
        if (config.encoder is not None) != (ENCODER_GRAPH_FILE in manifest.files):
            wrong = "lacks" if config.encoder else "lists, for a model without an encoder,"
            raise ValueError(f"{MANIFEST_FILE} {wrong} {ENCODER_GRAPH_FILE}")
        files = read_extra_files(directory)
        defaults = GenerationDefaults.parse(files), *parse_template(files)
        extras = *defaults, EmbeddingDefaults.parse(files), _parse_examples(files)
    except OSError as error:
        file = error.filename or directory
        raise ModelDirectoryError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = f"{directory} cannot be loaded: {error}"
        raise ModelDirectoryError(f"{reason}; export the model again") from None
    return ModelDirectory(directory, config, manifest, tokenizer, *extras)


def _export_command(source: object, out: object = "FOLDER") -> str:
    return f"kvasir export {source} --out {out}"


def _check_files(directory: Path, hashes: Mapping[str, str]) -> None:
    """Raise ModelDirectoryError unless a directory holds what its manifest lists, and no more."""
    remedy = "copy it again or export the model again"
    for name, expected in hashes.items():
        path = directory / name
        if Path(name).name != name:
            raise ModelDirectoryError(
                f"{directory / MANIFEST_FILE} lists {name!r}, which is outside the directory"
            )
        if not path.is_file():
            raise ModelDirectoryError(f"{path} is missing; {remedy}")
        if sha256(path) != expected:
            problem = f"{path} does not match its hash in {MANIFEST_FILE}; {remedy}"
            raise ModelDirectoryError(find_mistake(directory) or problem)
    for name in {*EXTRA_FILES, *_GRAPHS, ADAPTERS_FILE} - hashes.keys():
        if (directory / name).exists():
            raise ModelDirectoryError(
                f"{directory / name} is not in {MANIFEST_FILE}; "
                "remove it, or export the model again with it"
            )


def _check_external_data(graph: Path, manifest: Manifest) -> None:
    """Raise ValueError for a graph whose weights are in a file without a hash."""
    try:
        unlisted = external_files(graph.read_bytes()) - manifest.files.keys()
    except ValueError as error:
        raise ValueError(f"{graph.name} {error}") from None
    if unlisted:
        raise ValueError(f"{graph.name} reads {min(unlisted)!r}, which is not in {MANIFEST_FILE}")


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        folder, inside = path.parent, min(path.parent.glob(f"*/{MANIFEST_FILE}"), default=None)
        problem = f"{folder} has no {path.name}, so it is not a model directory"
        problem += f"; make one with: {_export_command(folder)}"
        if inside is not None:
            problem = f"{folder} holds model directories; name one, as {inside.parent}"
            problem += f", or serve all: kvasir serve --models-dir {folder}"
        raise ModelDirectoryError(find_mistake(folder) or problem)
    try:
        values = parse_object(read_limited(path))
        version = values.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:  # the rest may have changed, too
            raise ModelDirectoryError(
                f"{path} has format version {version}, newer than {FORMAT_VERSION}, "
                "which this Kvasir reads; upgrade it"
            )
        manifest = Manifest.model_validate(values)
    except ValueError as error:
        problem = first_problem(error, Manifest.model_fields)
        raise ValueError(f"{path.name} is damaged: {problem}") from None
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise ValueError(f"{path.name} does not list {name}")
    return manifest


def read_extra_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of those of EXTRA_FILES that there are, by name."""
    files = (directory / name for name in EXTRA_FILES)
    return {file.name: read_limited(file, _MOST_EXTRA) for file in files if file.is_file()}


def load_config_and_tokenizer(directory: Path) -> tuple[TransformerConfig, Tokenizer]:
    """Read both files. Raises ConfigError, TokenizerError (also for too many ids) and OSError."""
    config = TransformerConfig.load(directory / CONFIG_FILE)
    return config, load_tokenizer(directory / TOKENIZER_FILE, config.vocab_size)


def _parse_examples(files: Mapping[str, bytes]) -> list[str]:
    try:
        return _Prompts.validate_json(files.get(EXAMPLES_FILE, b"[]"), strict=True)
    except ValueError as error:
        raise ValueError(f"{EXAMPLES_FILE}: {first_problem(error)}") from None


def parse_template(files: Mapping[str, bytes]) -> tuple[str | None, dict[str, str]]:
    """Return the chat template among files, and its special tokens by name. Raises ValueError."""
    name = CHAT_TEMPLATE_FILE
    try:
        template = files[name].decode() if name in files else None
        name = SPECIAL_TOKENS_FILE
        values = parse_object(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return template, token_texts(values)


def token_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name: values, or their "content"."""
    return {
        name: text
        for name, value in values.items()
        if isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
    }
