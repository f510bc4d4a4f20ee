"""The one place where a CompletionRequest is made, with tokenised prompts and all defaults."""

from __future__ import annotations

import math
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from kvasir.server.engine.engine import Engine
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.sampling.params import BeamParams, SamplingParams
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.admission.answers import AnswerMemory
from kvasir.server.requests.admission.queue import Admission
from kvasir.server.requests.async_engine import AsyncEngine
from kvasir.server.requests.completion import RequestState
from kvasir.server.requests.prompts import PromptReader
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.target import TargetOptions, target_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The content of a request's body, in one form for every protocol.

    Without `max_tokens`, the default is `default_max_tokens`, or less if the context or the KV
    cache has less room.
    """

    prompts: Sequence[str | list[int]]
    params: SamplingParams  # without max_tokens and seed
    max_tokens: int | None
    default_max_tokens: int
    seed: int | None  # None draws one
    n: int = 1
    target: TargetOptions = field(default_factory=TargetOptions)
    stops: Sequence[str] = ()
    timeout_ms: int | None = None
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None
    kept_ids: frozenset[int] = frozenset()
    begins_text: bool = False
    shows_prompt: bool = False
    keep_last: int | None = None  # prompt tokens to keep; -1 is as many as fit
    add_special_tokens: bool = True  # such as BOS
    with_offsets: bool = False  # compute Prompt.offsets
    prediction: str = ""  # text that the answer may have
    field_prefix: str = ""  # of the sampling fields, in errors


@dataclass(frozen=True)
class RequestBuilder(PromptReader):
    """A builder of requests for one model."""

    engine: AsyncEngine
    admission: Admission
    answers: dict[bool, AnswerMemory]

    async def build(self, options: RequestOptions, state: RequestState) -> CompletionRequest:
        """Return the request for a body. Raises InvalidRequestError, and UnavailableError."""
        self.admission.check_open()
        params = replace(options.params, beams=options.target.beams)
        max_tokens, config = options.max_tokens, self.model_dir.config
        prefix, prediction = await self._target_prefix(options), list[int]()
        if options.prediction:
            prediction = await self.tokenize_target(options.prediction, "prediction")
        n_each = params.n_rows if params.beams else options.n
        self.admission.check_size(len(options.prompts) * n_each)
        self.check_token_ids(params.stop_token_ids, f"{options.field_prefix}stop_token_ids")
        self.check_token_ids(params.logit_bias, f"{options.field_prefix}logit_bias")
        keep_last = options.keep_last
        if keep_last == -1:
            most = self.limits.max_model_len - max(1, max_tokens or 1)
            keep_last = self.limits.max_source_len or max(1, most)
        prompts = await self.tokenize(
            options.prompts,
            keep_last=keep_last,
            add_special_tokens=options.add_special_tokens,
            with_offsets=options.with_offsets,
            source_language=options.target.source_language,
        )
        if max_tokens is None:
            longest = max(len(prompt.ids) for prompt in prompts)
            default = options.default_max_tokens if config.encoder is None else self.max_model_len
            max_tokens = self._room(longest, len(prefix), params.n_rows, default)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) must be at most the {max_tokens} tokens to "
                "generate",
                param="min_tokens",
            )
        ending_ids = params.stop_token_ids.union(() if params.ignore_eos else config.eos_token_ids)
        if params.min_tokens and len(ending_ids) >= config.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: all {config.vocab_size} tokens would end the text, "
                "which min_tokens forbids at first; name fewer",
                param="stop_token_ids",
            )
        if params.beams is not None:
            self._check_search(params.beams, options.n, ending_ids)
        seed = secrets.randbits(64) if options.seed is None else options.seed
        salt = b"" if self.settings.share_prefix_cache else state.caller.salt
        if options.cache_salt:  # of 128 bits for both together
            salt = blake2b(options.cache_salt.encode(), key=salt, digest_size=16).digest()
        wanted = CompletionRequest(
            prompts=prompts,
            params=replace(params, max_tokens=max_tokens, seed=seed),
            request_id=state.id,
            n=options.n,
            target_prefix=prefix,
            prediction=prediction,
            ending_ids=ending_ids,
            stops=tuple(options.stops),
            deadline=self.deadline(state, options.timeout_ms),
            priority=state.priority(options.priority),
            caller=state.caller,
            cache_salt=salt,
            grammar=options.grammar,
            kept_ids=options.kept_ids,
            begins_text=options.begins_text or (bool(prefix) and not options.target.decoder_prompt),
            shows_prompt=options.shows_prompt,
        )
        return self._fitting(wanted, self.answers[state.is_background], options)

    def _room(self, n_prompt: int, n_given: int, n_rows: int, most: int) -> int:
        """Return how many new tokens fit the context and the KV cache, from 1 to `most`."""
        n_new = min(most, self.limits.after(n_prompt) - n_given)
        if isinstance(engine := self.engine.engine, Engine):
            needed = partial(engine.kv.reservation, n_prompt)
            after = range(n_given + 1, n_given + n_new + 1)
            n_new = bisect_right(after, engine.kv.budget_tokens // n_rows, key=needed)
        return max(1, n_new)

    def _fitting(
        self, wanted: CompletionRequest, answers: AnswerMemory, options: RequestOptions
    ) -> CompletionRequest:
        """Return a request whose answer is not too large; without `max_tokens`, a shorter one."""
        params, per_token = wanted.params, wanted.bytes_of_token
        excess = wanted.answer_bytes - answers.most
        if excess > 0 and options.max_tokens is None and per_token:
            shorter = params.max_tokens - math.ceil(excess / per_token)
            if shorter >= max(1, params.min_tokens):
                return replace(wanted, params=replace(params, max_tokens=shorter))
        advice = (
            f"ask for fewer log-probabilities (of a new token {params.logprobs}, of a prompt's "
            f"{params.prompt_logprobs}), new tokens (up to {params.max_tokens}), samples "
            f"({wanted.n}) or prompts ({len(wanted.prompts)})"
        )
        answers.check(wanted.answer_bytes, advice)
        return wanted

    async def _target_prefix(self, options: RequestOptions) -> list[int]:
        """Return the tokens that begin a target; none without an encoder."""
        target = options.target
        target.check_supported(self.model_dir)
        if self.model_dir.config.encoder is None:
            return []
        if options.params.prompt_logprobs is not None:
            message = "the tokens of a source have no log-probabilities; ask for the target's alone"
            raise InvalidRequestError(message)
        prefix = target_prefix(self.model_dir, target.target_language)
        if target.decoder_prompt:
            prefix += await self.tokenize_target(target.decoder_prompt, "decoder_prompt")
        return prefix

    def _check_search(self, beams: BeamParams, n: int, ending_ids: frozenset[int]) -> None:
        """Raise InvalidRequestError for a beam search that can never run."""
        for most, why in (
            (self.settings.max_num_seqs, "run at once (setting max_num_seqs)"),
            (
                self.model_dir.config.vocab_size - len(ending_ids),
                "continue a text with other tokens",
            ),
        ):
            if beams.width > most:
                message = f"num_beams: {beams.width} are too many; at most {most} can {why}"
                raise InvalidRequestError(message, param="num_beams")
        if n > beams.width:
            message = f"n ({n}) must be at most num_beams ({beams.width}), the texts that are found"
            raise InvalidRequestError(message, param="n")

    def deadline(self, state: RequestState, timeout_ms: int | None) -> float:
        """Return the end of a request's time, or of the default one, in `perf_counter` seconds."""
        default = None if state.is_background else self.settings.default_timeout_ms
        return state.arrived + (timeout_ms or default or math.inf) / 1000
