"""The server's settings, each set by an option, by KVASIR_<NAME>, or left at its default."""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kvasir.server.errors import StartupError
from kvasir.server.setting_values import (
    Host,
    KeepAlive,
    Named,
    Origin,
    Seconds,
    describe_fault,
    listed,
    split,
    split_name,
)

PREFIX = "KVASIR_"


class Settings(BaseSettings):
    """Frozen settings, checked once. `load_settings` builds them, with errors of one line."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    model: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(listed)] = ()
    """Model directory, checkpoint, .gguf file or hf://org/name, or several. NAME=DIR names one."""
    models_dir: Path | None = None
    """Folder of model directories, each loaded when a request names it, and unloaded again."""
    models_memory: ByteSize | None = Field(None, gt=0)
    """Memory for the models of models_dir, caches included. Default: what is free at the start."""
    keep_alive: KeepAlive = 300.0
    """Time for which a model of models_dir stays loaded when unused, such as 5m; -1 is for ever."""
    models_admin_key: SecretStr | None = Field(None, min_length=1)
    """Key of POST /v1/models/load and unload. Default: neither is served."""
    cache_dir: Path | None = None
    """Folder of pulled models and of exports. Default: ~/.cache/kvasir."""
    precision: Literal["int8", "int4", "fp32"] | None = None
    """Precision in which checkpoints are exported, which happens once. Default: int8."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface, :: every one by IPv4 and IPv6."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 lets the system choose."""
    served_model_name: str | None = Field(None, min_length=1)
    """Model id in the API, of a lone model. Default: the directory's name."""
    max_num_seqs: int = Field(16, ge=1, le=1024)
    """Sequences that run at once. Default of encoder-decoders: 64, since each beam is one."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum tokens of a prompt and its completion. Default: the model's own limit."""
    chunk_size: int | None = Field(None, ge=2)
    """Maximum prompt tokens in a step. Default: 256; on a GPU 2048."""
    itl_target_ms: int | None = Field(
        None,
        ge=0,
        le=3_600_000,
        description="Milliseconds to which steps beside streams keep by running fewer prompt "
        "tokens, but at least 8 and 1/32 of chunk_size; 0 is no limit. Default: four measured "
        "steps without prompts.",
    )
    kv_cache_memory: ByteSize | None = Field(None, gt=0)
    """Memory for the KV cache, such as 2GiB. Default: half of what is free; on a GPU 90 %."""
    adapter: Annotated[tuple[Named, ...], NoDecode, BeforeValidator(split)] | None = None
    """Adapter of peft for a model that is served, as NAME=DIR; or several."""
    adapter_dir: Path | None = None
    """Folder of further adapters, each in a folder of its name, found when a request names it."""
    adapter_memory: ByteSize = Field(ByteSize(2**30), gt=0)
    """Memory for adapters. One that nobody uses leaves it when another needs the room."""
    adapter_admin_key: SecretStr | None = Field(None, min_length=1)
    """Key of POST /v1/load_lora_adapter and unload_lora_adapter. Default: neither is served."""
    prefix_cache_memory: ByteSize | None = Field(
        None,
        ge=0,
        description="Memory beside kv_cache_memory for prompt prefixes that are kept for reuse; "
        "0 keeps none. Default: a tenth of kv_cache_memory. On a GPU prefixes stay in free blocks "
        "of the KV cache; 0 shares none.",
    )
    prefix_dir: Path | None = None
    """Folder for prompt prefixes that are used again, so that they outlive the server. On CPUs."""
    prefix_dir_bytes: ByteSize = Field(ByteSize(4 * 2**30), gt=0)
    """Maximum size of the files in prefix_dir; the least recently used go first."""
    kv_events: str | None = Field(None, pattern=r"^(tcp|ipc)://.")
    """ZMQ address at which routers hear what the prefix cache keeps: tcp://*:5557 listens."""
    kv_events_replay: str | None = Field(None, pattern=r"^(tcp|ipc)://.")
    """ZMQ address at which routers ask for lost kv_events again, such as tcp://*:5558."""
    share_prefix_cache: bool = False
    """Share prefixes between API keys, which then learn what prompts of others begin with."""
    speculate: bool | None = Field(
        None,
        description="Draft text that repeats itself or that a request predicts. Stock operators "
        "then round as the load has it. Default: only where answers stay the same.",
    )
    cuda_graphs: bool = True
    """Launch the kernels of a decode together, on CUDA, unless several models are served."""
    kernels: Literal["auto", "off", "scalar", "avx2", "avx512", "amx", "neon"] = "auto"
    """Operators of Kvasir's own on the CPU, for the fastest instructions or those named."""
    threads: int | None = Field(None, ge=1)
    """Compute threads. Default: the CPUs that this process may use."""
    max_queue: int | None = Field(None, ge=0)
    """Sequences that may wait, of 4096 tokens on average. Default: 4 x max_num_seqs; 4096 texts."""
    max_body_bytes: ByteSize = Field(ByteSize(4 * 2**20), gt=0)
    """Maximum size of a request's body; unfinished bodies together may have 6 times as much."""
    default_timeout_ms: int | None = Field(None, ge=1, le=86_400_000)
    """Deadline of a request that names none. Default: none."""
    exit_on_failure: bool = False
    """End the process, with exit code 1, once an engine has failed or hangs."""
    drain_timeout: Seconds = 45.0
    """Seconds that running requests get to finish at shutdown."""
    send_timeout: Seconds = 60.0
    """Seconds after which a client that does not read its answer is cut off."""
    api_key: SecretStr | None = Field(None, min_length=1)
    """The key that clients must send."""
    api_key_file: Path | None = Field(
        None,
        description="File of keys, one a line, read when it changes; if missing or empty, old keys "
        "stay valid. Before a key may stand name=N, concurrency=N and tokens_per_minute=N; a line "
        "that begins with * gives limits to those below it.",
    )
    salt: SecretStr | None = None
    """Secret that all replicas share: a key is then one caller on all of them. Default: random."""
    salt_file: Path | None = None
    """File that holds the salt."""
    state_url: SecretStr | None = Field(
        None,
        description="URL of a Redis or Valkey in which replicas count limits, keep responses and "
        "answer batches together, such as redis://host:6379/0. Default: each for itself.",
    )
    state_url_file: Path | None = None
    """File that holds the state_url."""
    cors_origins: Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(split)] | None = None
    """Origins whose pages may call from browsers, comma-separated; * is all. Default: none."""
    allowed_hosts: Annotated[tuple[Host, ...], NoDecode, BeforeValidator(split)] | None = None
    """Names that a server without keys answers to, beside localhost; *.a.org is a domain, * any."""
    tool_call_format: Literal[
        "auto", "hermes", "llama", "mistral", "mistral_args", "granite", "nemotron", "hunyuan",
        "deepseek", "deepseek_v31", "kimi", "qwen_coder", "seed", "minimax", "glm", "pythonic",
        "lfm", "gemma", "none",
    ] = Field(
        "auto",
        description="Format of the model's function calls, such as hermes, <tool_call>{…}"
        "</tool_call>, or llama, bare JSON; none finds no calls. Default: that of its chat "
        "template.",
    )  # fmt: skip
    reasoning_format: Literal[
        "auto", "think", "mistral", "seed", "cohere", "gemma", "none",
    ] = Field(
        "auto",
        description="Tags of the model's reasoning: think is <think>, mistral is [THINK], seed is "
        "<seed:think>, cohere and gemma are those of these models, none finds none. Default: those "
        "that its chat template names.",
    )  # fmt: skip
    batch_dir: Path | None = None
    """Folder for /v1/files and /v1/batches; with state_url that of all replicas. Default: none."""
    batch_dir_bytes: ByteSize = Field(ByteSize(2 * 2**30), gt=0)
    """Most bytes in batch_dir; with api_key_file a key may use as much as it leaves to others."""
    stored_responses_memory: ByteSize = Field(
        ByteSize(64 * 2**20),
        description="Memory for answers of /v1/responses, kept with their conversations for "
        "follow-ups, of all replicas with state_url; the key with most loses its oldest. 0 keeps "
        "none.",
    )
    explain: bool = True
    """Serve POST /explain, whose requests cost a pass over their text in a second session."""
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://.+")
    """URL for OpenTelemetry spans (OTLP over HTTP), such as http://collector:4318/v1/traces."""
    root_path: str = Field("", pattern=r"^(/[^/]+)*$")
    """Path prefix that a proxy in front removes, such as /llm."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line shown."""
    log_format: Literal["auto", "text", "json"] = "auto"
    """Lines for people or for machines; auto is text on a terminal and JSON elsewhere."""

    @property
    def has_keys(self) -> bool:
        """True if clients must send a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def has_adapters(self) -> bool:
        """True if requests may name adapters."""
        return bool(self.adapter) or self.adapter_dir is not None

    @cached_property
    def adapters(self) -> dict[str, Path]:
        """The folders of `adapter` by their ids in the API."""
        pairs = (named.partition("=") for named in self.adapter or ())
        return {name: Path(directory) for name, _, directory in pairs}

    def of_model(self, *, has_encoder: bool) -> Settings:
        """Return the settings of a model of text, which has defaults of its kind."""
        if not has_encoder or "max_num_seqs" in self.model_fields_set:
            return self
        return self.model_copy(update={"max_num_seqs": 64})

    @property
    def queue_limit(self) -> int:
        """The number of sequences that may wait."""
        return 4 * self.max_num_seqs if self.max_queue is None else self.max_queue

    @property
    def text_queue_limit(self) -> int:
        """The number of texts that may wait for their vectors, which take little time each."""
        return 4096 if self.max_queue is None else self.max_queue

    @property
    def queue_tokens_limit(self) -> int:
        """The number of prompt tokens that may wait."""
        return 4096 * self.queue_limit

    @cached_property
    def models(self) -> dict[str, Path]:
        """The model directories by their ids in the API."""
        models = {}
        for given in self.model:
            name, directory = split_name(given)
            models[name or self.served_model_name or directory.resolve().name] = directory
        return models | self.folder_models

    @cached_property
    def folder_models(self) -> dict[str, Path]:
        """The model directories of `models_dir` by their ids in the API, found once."""
        found = sorted(self.models_dir.glob("*/manifest.json")) if self.models_dir else []
        return {file.parent.name: file.parent for file in found}

    @property
    def model_name(self) -> str:
        """The id of the first model, which is the default where a protocol names none."""
        return next(iter(self.models))


def user_cache() -> Path:
    """Return this user's folder for what can be made again. Raises StartupError without one."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvasir"
    except RuntimeError:
        raise StartupError("this user has no home directory; set KVASIR_CACHE_DIR") from None


def load_settings(**options: Any) -> Settings:
    """Return settings from options and the environment; None is an option that is not given.

    Raises StartupError, in one line that names the setting.
    """
    variables = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in variables:
            near = get_close_matches(name.upper(), variables, n=1)
            hint = f"did you mean {near[0]}" if near else "kvasir serve --help lists them"
            raise StartupError(f"unknown setting {name} in the environment; {hint}")
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        raise StartupError(_refusal(error)) from None
    if len(settings.model) > 1 and settings.served_model_name:
        raise StartupError("setting served_model_name is for a lone model; write NAME=DIR instead")
    if not settings.models:
        wanted = f"name a model directory: kvasir serve DIR, or {PREFIX}MODEL=DIR"
        if (folder := settings.models_dir) is not None:
            wanted = f"setting models_dir: {folder} holds no folder with a manifest.json"
        raise StartupError(wanted)
    if settings.prefix_dir is not None and not settings.model:
        raise StartupError("setting prefix_dir is for models that stay loaded; name one of them")
    needs = {"models_admin_key": "models_dir", "adapter_admin_key": "adapter_dir"}
    for name, needed in (needs | {"kv_events_replay": "kv_events"}).items():
        if getattr(settings, name) is not None and getattr(settings, needed) is None:
            raise StartupError(f"setting {name} needs {needed}, to which it belongs")
    if len(settings.models) < len(settings.model) + len(settings.folder_models):
        given = ", ".join(map(str, [*settings.model, *settings.folder_models.values()]))
        raise StartupError(f"two of the models have the same name: {given}; name one: NAME=DIR")
    names = [*settings.models, *settings.adapters]
    if len(settings.adapters) < len(settings.adapter or ()) or len({*names}) < len(names):
        listed = ", ".join(map(str, settings.adapter or ()))
        raise StartupError(f"two adapters, or one and a model, have the same name: {listed}")
    return settings


def _refusal(error: ValidationError) -> str:
    first = error.errors()[0]
    name, fault = str(first["loc"][0]), describe_fault(error)
    secrets = ("api_key", "adapter_admin_key", "models_admin_key", "salt", "state_url")
    given = "" if name in secrets else f" = {first['input']!r}"
    if first["type"] == "string_pattern_mismatch":
        fault = f"does not fit; it is: {Settings.model_fields[name].description}"
    return f"setting {name} ({PREFIX}{name.upper()}){given} {fault}"
