"""A model directory in this process, without a server: what `kvasir.load` returns."""

from __future__ import annotations

import collections.abc
import math
import secrets
from collections.abc import Generator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from kvasir.model.directory import ModelDirectory
from kvasir.model.records import GenerationDefaults
from kvasir.server.engine.encoder.engine import EncoderEngine
from kvasir.server.engine.encoder.sequence import EncoderSequence
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from kvasir.server.engine.sequence import FinishReason, Sequence
from kvasir.server.process.engine_builder import build_encoder_engine, build_engine, check_model
from kvasir.server.requests.admission.queue import check_length
from kvasir.server.requests.served_model import chat_format
from kvasir.server.setting_values import describe_fault
from kvasir.server.settings import load_settings
from kvasir.server.text.chat_format import ChatFormat
from kvasir.server.text.detokenizer import Detokenizer, StopChecker

_NEW_TOKENS = 128  # by default, if as many fit

Prompt = str | collections.abc.Sequence[Mapping[str, Any]]


class Piece(NamedTuple):
    """The text that a token adds, if any yet. The last piece has a finish reason and no token.

    probability: the raw model's, if `SamplingParams.logprobs` asks for it.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    probability: float | None = None


def complete(
    engine: Engine, model_dir: ModelDirectory, prompt_ids: list[int], params: SamplingParams
) -> Generator[Piece]:
    """Yield the pieces of a completion; `check_length` must have accepted the prompt.

    Raises ValueError while another one of this engine has not been read to its end.
    """
    if engine.has_work:
        raise ValueError("another answer has not ended: read it to its end, or close it")
    ending_ids = frozenset(model_dir.config.eos_token_ids)
    prefix = list(model_dir.config.target_prefix)
    sequence = Sequence(0, prompt_ids, params, ending_ids, perf_counter(), target_prefix=prefix)
    text, reason = Detokenizer(model_dir.tokenizer, () if prefix else prompt_ids), None
    engine.add(sequence)
    try:
        while engine.has_work:
            for output in engine.step()[0]:
                reason = output.finish_reason
                if output.token_id is not None and reason is not FinishReason.STOP:
                    probability = math.exp(output.logprobs.logprob) if output.logprobs else None
                    yield Piece(text.push(output.token_id), output.token_id, None, probability)
        yield Piece(text.flush(), None, reason)
    finally:
        engine.abort(sequence.id)  # if its reader has left


class Model:
    """A loaded model directory, for one caller at a time. Close it, or use it in a `with` block.

    settings: those of `kvasir serve`, such as threads. Raises StartupError and ValueError, in one
    line, for what cannot be loaded here.
    """

    def __init__(self, directory: str | Path, **settings: Any) -> None:
        self._settings = load_settings(model=Path(directory), **{"max_num_seqs": 1} | settings)
        self.model_dir = check_model(self._settings)
        build = build_engine if self.model_dir.config.pooling is None else build_encoder_engine
        self._loaded: Engine | EncoderEngine | None = build(self._settings, self.model_dir)

    def generate(self, prompt: Prompt, **options: Any) -> str:
        """Return the text after a prompt; the options are those of `stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | collections.abc.Sequence[str] = (),
    ) -> Generator[str]:
        """Yield the text after a prompt as it comes.

        prompt: a text, or the messages of a chat, each with a role and content. max_tokens: 128 by
        default, or as many as fit. Sampling defaults to what the model recommends, with a new seed
        each time. stop: texts that end it, and are left out. At its first text it raises
        ContextLengthError if the prompt is too long, ChatTemplateError, and ValueError for options
        out of range, a model that makes vectors, and while another stream has not ended.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ValueError("a stop text is empty; leave it out")
        try:
            given = GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p)
        except ValidationError as error:
            (name,), value = error.errors()[0]["loc"], error.errors()[0]["input"]
            raise ValueError(f"{name} = {value!r} {describe_fault(error)}") from None
        checker = StopChecker(stops)
        ids, params = self.plan(prompt, given, max_tokens=max_tokens, seed=seed)
        with closing(self.pieces(ids, params)) as pieces:
            for piece in pieces:
                text = checker.push(piece.text)
                if piece.finish_reason is not None:
                    text += checker.flush()
                if text:
                    yield text
                if checker.stopped:
                    return

    def plan(
        self,
        prompt: Prompt,
        given: GenerationDefaults,
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
    ) -> tuple[list[int], SamplingParams]:
        """Return a prompt's tokens and the parameters after it. Raises as `stream` does."""
        engine, tokenizer = self._generating(), self.model_dir.tokenizer
        is_text = isinstance(prompt, str)
        if isinstance(prompt, str):
            text = prompt
        elif self._chats is None:
            raise ValueError(f"{self.model_dir.path} has no chat template; give a text")
        else:
            messages = [dict(message) for message in prompt]
            text = self._chats.render(messages, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=is_text).ids
        n_given = len(self.model_dir.config.target_prefix)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        if max_tokens is None:
            max_tokens = max(1, min(_NEW_TOKENS, engine.limits.after(len(ids)) - n_given))
        check_length(len(ids), max_tokens, engine, n_given)
        fields: dict[str, Any] = self.model_dir.default_sampling.given() | given.given()
        seed = secrets.randbits(64) if seed is None else seed
        return ids, SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs, **fields)

    def pieces(self, prompt_ids: list[int], params: SamplingParams) -> Generator[Piece]:
        """Yield the pieces of a completion of what `plan` returned."""
        return complete(self._generating(), self.model_dir, prompt_ids, params)

    def embed(
        self, texts: collections.abc.Sequence[str], *, prompt_name: str | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors of texts [n_texts, d_out], as the server does.

        prompt_name: the model's prompt to put before each text; the default is the model's choice.
        Raises ValueError for a model that makes no vectors, for an unknown prompt, and for a text
        that is empty or longer than the model takes.
        """
        pooling, embedding = self.model_dir.config.pooling, self.model_dir.embedding
        if not isinstance(engine := self._engine, EncoderEngine) or pooling is None:
            raise ValueError(f"{self.model_dir.path} continues texts and makes no vectors of them")
        if pooling.labels:
            labels = ", ".join(pooling.labels)
            raise ValueError(f"{self.model_dir.path} makes no vectors, but scores of {labels}")
        name = prompt_name or embedding.default_prompt_name
        if name is not None and name not in embedding.prompts:
            names = ", ".join(embedding.prompts) or "none"
            raise ValueError(f"the model has no prompt {name!r}; it has {names}")
        if isinstance(texts, str) or not texts:
            raise ValueError(f"texts is {texts!r}; give a list of at least one text")
        before = "" if name is None else embedding.prompts[name]
        encodings = self.model_dir.tokenizer.encode_batch_fast([before + text for text in texts])
        for place, encoding in enumerate(encodings):
            if not 1 <= len(encoding.ids) <= engine.max_model_len:
                raise ValueError(
                    f"text {place} has {len(encoding.ids)} tokens; the model takes 1 to "
                    f"{engine.max_model_len}"
                )
        vectors: dict[int, NDArray[np.float32]] = {}
        params, now, ids = SamplingParams(max_tokens=0), perf_counter(), range(len(encodings))
        try:
            for i, encoding in zip(ids, encodings, strict=True):
                engine.add(EncoderSequence(i, encoding.ids, params, frozenset(), now))
            while engine.has_work:
                for output in engine.step()[0]:
                    assert output.vectors is not None
                    vectors[output.sequence_id] = output.vectors
        finally:
            for i in ids:
                engine.abort(i)  # after Ctrl-C some would be left
        return np.array([vectors[i] for i in ids], dtype=np.float32)

    def close(self) -> None:
        """Free the model's memory."""
        self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine | EncoderEngine:
        if self._loaded is None:
            raise ValueError(f"{self.model_dir.path} has been closed; load it again")
        return self._loaded

    def _generating(self) -> Engine:
        if not isinstance(engine := self._engine, Engine):
            pooling = self.model_dir.config.pooling
            can = "makes vectors of texts", "kvasir embed, or kvasir serve for /v1/embeddings"
            if pooling is not None and pooling.labels:
                can = "scores texts", "kvasir serve for /v1/rerank, /predict and /v1/classify"
            raise ValueError(
                f"{self.model_dir.path} {can[0]} and cannot continue them; use {can[1]}"
            )
        return engine

    @cached_property
    def _chats(self) -> ChatFormat | None:
        return chat_format(self._settings, self.model_dir)
