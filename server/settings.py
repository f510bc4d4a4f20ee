"""Every knob of the server: one documented field each, set by an option, by KVASIR_<NAME>, or left at its default."""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from server.engine.machine import SPIN_MICROSECONDS
from server.errors import StartupError

PREFIX = "KVASIR_"
_PLAIN = {  # in this order
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be a valid boolean, unable to interpret input": "must be true or false",
    "Input should be a finite number": "must be a number",
    "could not parse value and unit from byte string": "must be a size, such as 2GiB",
    "Extra inputs are not permitted": "is unknown; kvasir serve --help lists them",
    "String should have": "must have",
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Origin = Annotated[
    str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s,]+)$")
]  # as browsers send it: no path, no slash
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Frozen, and checked once. Build it with `load_settings`, whose errors are one line."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    model: Path = Field(description="Model directory, as written by kvasir export.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface.")
    port: int = Field(
        8000, ge=0, le=65535, description="Port to listen on; 0 lets the system choose."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Model id in the API. Default: the directory's name."
    )
    max_num_seqs: int = Field(16, ge=1, le=1024, description="Sequences that run at once.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Most tokens of a prompt and its completion. Default: the model's own limit.",
    )
    chunk_size: int | None = Field(
        None,
        ge=2,
        description="Most prompt tokens that are run in one step. Default: 256; on a GPU 2048.",
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for keys and values, such as 2GiB. Default: half of what is free; on a GPU 90 %.",
    )
    prefix_cache_memory: ByteSize | None = Field(
        None,
        ge=0,
        description="Memory beside kv_cache_memory for beginnings of prompts that are kept for reuse; 0 keeps none. "
        "Default: a tenth of kv_cache_memory. On a GPU they stay in the blocks that nobody needs; 0 shares none.",
    )
    speculate: bool = Field(
        False,
        description="Guess tokens from the text so far while few sequences run: faster where it repeats itself, but "
        "rounding then depends on the load, and so may answers.",
    )
    threads: int | None = Field(
        None, ge=1, description="Compute threads. Default: the CPUs this process may use."
    )
    spin_microseconds: int = Field(
        SPIN_MICROSECONDS,
        ge=0,
        le=1_000_000,
        description="How long an idle compute thread waits for more work before it sleeps.",
    )
    max_queue: int | None = Field(
        None,
        ge=0,
        description="Sequences that may wait beyond those that run. Default: 4 x max_num_seqs.",
    )
    max_queue_tokens: int | None = Field(
        None,
        ge=0,
        description="Prompt tokens of the sequences that may wait; one that waits alone may have more. "
        "Default: 4096 for each of max_queue.",
    )
    max_concurrency_per_key: int | None = Field(
        None, ge=1, description="Requests that each API key may have in flight. Default: no limit."
    )
    max_header_bytes: ByteSize = Field(
        ByteSize(32 * 2**10),
        ge=1024,
        description="Longest head of a request: its URL and its headers.",
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(4 * 2**20), gt=0, description="Largest request body, such as 4MiB."
    )
    default_timeout_ms: int | None = Field(
        None,
        ge=1,
        le=86_400_000,
        description="Deadline of a request that names none. Default: none.",
    )
    drain_timeout: Seconds = Field(
        45.0, description="Seconds that running requests get to finish at shutdown."
    )
    receive_timeout: Seconds = Field(
        30.0,
        description="Seconds in which a request has to come, or at least 500 bytes of its body for each of them.",
    )
    send_timeout: Seconds = Field(
        60.0,
        description="Seconds after which a client that does not read its answer counts as gone.",
    )
    keep_alive_interval: Seconds = Field(
        15.0, description="Seconds of silence before a stream gets a comment line."
    )
    api_key: SecretStr | None = Field(
        None, min_length=1, description="The key that clients must send."
    )
    api_key_file: Path | None = Field(
        None,
        description="File of keys that clients may send, one on each line; read again when it changes. "
        "While it is gone or holds no key, the keys stay as they were.",
    )
    cors_origins: Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_split)] | None = Field(
        None,
        description="Origins of pages that browsers may call from, with commas between; * is all. Default: none.",
    )
    tool_call_format: Literal["auto", "hermes", "llama", "none"] = Field(
        "auto",
        description="How the model writes calls of functions: <tool_call>{…}</tool_call>, bare JSON, or in no way that "
        "is known. Default: as its chat template does.",
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://.+",
        description="Where to send OpenTelemetry spans by OTLP over HTTP, such as http://collector:4318/v1/traces.",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[^/]+)*$",
        description="Path that a proxy in front takes off, such as /llm.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line shown."
    )

    @property
    def queue_limit(self) -> int:
        return 4 * self.max_num_seqs if self.max_queue is None else self.max_queue

    @property
    def queue_tokens_limit(self) -> int:
        return 4096 * self.queue_limit if self.max_queue_tokens is None else self.max_queue_tokens

    @cached_property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name


def plain(message: str) -> str:
    """Pydantic's words in ours."""
    for theirs, ours in _PLAIN.items():
        message = message.replace(theirs, ours)
    return message


def load_settings(**options: Any) -> Settings:
    """Settings from options (None is "not given") and the environment. Raises StartupError naming the bad setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    if unknown := sorted(
        name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known
    ):
        near = get_close_matches(unknown[0].upper(), known, n=1)
        mend = f"did you mean {near[0]}" if near else "kvasir serve --help lists them"
        raise StartupError(f"unknown setting {unknown[0]} in the environment; {mend}")
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise StartupError(
                f"name a model directory: kvasir serve DIR, or {PREFIX}MODEL=DIR"
            ) from None
        name = str(first["loc"][0]) if first["loc"] else "settings"
        given = "" if name == "api_key" else f" = {first['input']!r}"
        fault = plain(first["msg"])
        if first["type"] == "string_pattern_mismatch":
            fault = f"does not fit; it is: {Settings.model_fields[name].description}"
        raise StartupError(f"setting {name} ({PREFIX}{name.upper()}){given} {fault}") from None
    if (
        settings.max_concurrency_per_key is not None
        and settings.api_key is None
        and settings.api_key_file is None
    ):
        raise StartupError(
            "setting max_concurrency_per_key needs keys; set api_key_file or api_key too"
        )
    return settings
