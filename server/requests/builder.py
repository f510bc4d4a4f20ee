"""The one place where a CompletionRequest is made, with tokenised prompts and all defaults."""

from __future__ import annotations

import math
import secrets
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b

from tokenizers import Encoding

from kvasir.model.bundle import ModelBundle
from kvasir.model.config import TransformerConfig
from kvasir.model.tokenizer import longest_token
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.grammar.constraints import Grammar
from kvasir.server.engine.model_runner import ContextLimits
from kvasir.server.engine.sampling import BeamParams, SamplingParams
from kvasir.server.errors import ContextLengthError, InvalidRequestError
from kvasir.server.requests.admission.answers import AnswerMemory
from kvasir.server.requests.admission.queue import Admission, context_length
from kvasir.server.requests.async_engine import AsyncEngine
from kvasir.server.requests.completion import CompletionRequest, Prompt, RequestState
from kvasir.server.requests.target import TargetOptions, source_ids, target_prefix
from kvasir.server.requests.text_worker import SHORT, TextWorker
from kvasir.server.settings import Settings
from kvasir.server.text.detokenizer import decoded_starts

MOST_BYTES, MOST_BYTES_PER_TOKEN = 2**18, 8  # of a text that is tokenised
MOST_TOKENS = 2**17  # of a list, if the model takes no more


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
    keep_last: int | None = None  # prompt tokens to keep
    add_special_tokens: bool = True  # such as BOS
    with_offsets: bool = False  # compute Prompt.offsets
    field_prefix: str = ""  # of the sampling fields, in errors


@dataclass(frozen=True)
class RequestBuilder:
    """A builder of requests for one model."""

    settings: Settings
    bundle: ModelBundle
    engine: AsyncEngine
    admission: Admission
    text_worker: TextWorker
    answers: dict[bool, AnswerMemory]

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its completion."""
        longest = self.bundle.config.max_model_len
        return min(longest, self.settings.max_model_len or longest)

    @property
    def limits(self) -> ContextLimits:
        """The maximum numbers of tokens."""
        encoder = self.bundle.config.encoder
        if encoder is None:
            return ContextLimits(self.max_model_len)
        longest = min(encoder.max_model_len, self.settings.max_model_len or encoder.max_model_len)
        return ContextLimits(self.max_model_len, longest)

    async def build(self, options: RequestOptions, state: RequestState) -> CompletionRequest:
        """Return the request for a body. Raises InvalidRequestError."""
        params = replace(options.params, beams=options.target.beams)
        max_tokens, config = options.max_tokens, self.bundle.config
        prefix = await self._target_prefix(options)
        n_each = params.n_rows if params.beams else options.n
        self.admission.check_size(len(options.prompts) * n_each)
        self.check_token_ids(params.stop_token_ids, f"{options.field_prefix}stop_token_ids")
        self.check_token_ids(params.logit_bias, f"{options.field_prefix}logit_bias")
        prompts = await self.tokenize(
            options.prompts,
            keep_last=options.keep_last,
            add_special_tokens=options.add_special_tokens,
            with_offsets=options.with_offsets,
            source_language=options.target.source_language,
        )
        if max_tokens is None:
            longest = max(len(prompt.ids) for prompt in prompts)
            most = options.default_max_tokens if config.encoder is None else self.max_model_len
            max_tokens = min(most, self.limits.after(longest) - len(prefix))
            if isinstance(engine := self.engine.engine, Engine):
                needed = partial(engine.kv.reservation, longest)
                room = engine.kv.budget_tokens // params.n_rows
                after = range(len(prefix) + 1, len(prefix) + max_tokens + 1)
                max_tokens = bisect_right(after, room, key=needed)
            max_tokens = max(1, max_tokens)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) must be at most the {max_tokens} tokens to "
                "generate",
                param="min_tokens",
            )
        eos_ids = () if params.ignore_eos else config.eos_token_ids
        ending_ids = params.stop_token_ids.union(eos_ids)
        if params.min_tokens and len(ending_ids) >= config.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: all {config.vocab_size} tokens would end the text, "
                "which min_tokens forbids at first; name fewer",
                param="stop_token_ids",
            )
        if params.beams is not None:
            self._check_search(params.beams, options.n, ending_ids)
        seed = secrets.randbits(64) if options.seed is None else options.seed
        wanted = CompletionRequest(
            prompts=prompts,
            params=replace(params, max_tokens=max_tokens, seed=seed),
            request_id=state.id,
            n=options.n,
            target_prefix=prefix,
            ending_ids=ending_ids,
            stops=tuple(options.stops),
            deadline=self.deadline(state, options.timeout_ms),
            priority=state.priority(options.priority),
            caller=state.caller,
            cache_salt=_salt(
                b"" if self.settings.share_prefix_cache else state.caller.salt, options.cache_salt
            ),
            grammar=options.grammar,
            kept_ids=options.kept_ids,
            begins_text=options.begins_text or (bool(prefix) and not options.target.decoder_prompt),
            shows_prompt=options.shows_prompt,
        )
        return self._fitting(wanted, self.answers[state.is_background], options)

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
        target.check_supported(self.bundle)
        if self.bundle.config.encoder is None:
            return []
        if options.params.prompt_logprobs is not None:
            message = "the tokens of a source have no log-probabilities; ask for the target's alone"
            raise InvalidRequestError(message)
        prefix = target_prefix(self.bundle, target.target_language)
        if target.decoder_prompt:
            prefix += await self.tokenize_target(target.decoder_prompt, "decoder_prompt")
        return prefix

    def _check_search(self, beams: BeamParams, n: int, ending_ids: frozenset[int]) -> None:
        """Raise InvalidRequestError for a beam search that can never run."""
        for most, why in (
            (self.settings.max_num_seqs, "run at once (setting max_num_seqs)"),
            (self.bundle.config.vocab_size - len(ending_ids), "continue a text with other tokens"),
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

    async def tokenize_target(self, text: str, param: str) -> list[int]:
        """Return the tokens of a target's given beginning; see `tokenize`."""
        most = self.limits.max_model_len
        (given,) = await self.tokenize([text], param=param, most=most, add_special_tokens=False)
        return given.ids

    async def tokenize(
        self,
        sources: Sequence[str | list[int]],
        *,
        param: str = "prompt",
        most: int | None = None,
        keep_last: int | None = None,
        add_special_tokens: bool = True,
        with_offsets: bool = False,
        source_language: str | None = None,
    ) -> list[Prompt]:
        """Return a prompt for each text or list of token ids; the options are RequestOptions'.

        param: the field that they are in, for errors. most: tokens of each; by default what the
        model takes of a prompt. source_language: see TargetOptions.
        Raises ContextLengthError, InvalidRequestError or OverloadedError.
        """
        if source_language is not None and not all(isinstance(one, str) for one in sources):
            raise InvalidRequestError(
                "source_language is for texts; put its token among those of the prompt",
                param="source_language",
            )
        work = partial(
            self._tokenize,
            sources,
            param,
            most or self.limits.prompt,
            keep_last,
            add_special_tokens,
            with_offsets,
            source_language,
        )
        return await self.text_worker.call(sum(map(len, sources)), work)

    def _tokenize(
        self,
        sources: Sequence[str | list[int]],
        param: str,
        most: int,
        keep_last: int | None,
        add_special_tokens: bool,
        with_offsets: bool,
        language: str | None,
    ) -> list[Prompt]:
        tokenizer = self.bundle.tokenizer
        texts = [source for source in sources if isinstance(source, str)]
        for one in texts:
            self.check_text(one, param, most if keep_last is None else None)
        if sum(map(len, texts)) <= SHORT:
            encodings = [tokenizer.encode(t, add_special_tokens=add_special_tokens) for t in texts]
        else:  # only the batch methods, even for one text, release the interpreter's lock
            encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
            encodings = encode(texts, add_special_tokens=add_special_tokens)
        encoded = iter(encodings)
        prompts = []
        for source in sources:
            text, offsets = None, None
            if isinstance(source, str):
                encoding = next(encoded)
                text, ids = source, encoding.ids
                if language is not None:
                    ids = source_ids(tokenizer, encoding, language)
                offsets = _starts(encoding) if with_offsets else None
            else:
                ids = source
            if keep_last is not None and len(ids) > keep_last:
                text, offsets, ids = None, None, ids[-keep_last:]
            if len(ids) > most:  # even without new tokens
                raise ContextLengthError(
                    f"{context_length(most)} the {param} has {len(ids)}; shorten it", param=param
                )
            if text is None:
                self.check_token_ids(ids, param, self.bundle.config.encoder)
                text = tokenizer.decode(ids)
                offsets = decoded_starts(tokenizer, ids) if with_offsets else None
            prompts.append(Prompt(ids, text, offsets))
        return prompts

    def check_text(self, text: str, param: str, most_tokens: int | None = None) -> None:
        """Raise ContextLengthError, before a text is tokenised, if it is too long for that.

        most_tokens: that it may have; None if the model need not read all of them.
        """
        if len(text) <= SHORT:  # cheap, and the error has the number of tokens
            return
        most = max(MOST_BYTES, MOST_BYTES_PER_TOKEN * self.limits.prompt)
        if (n_bytes := len(text.encode())) > most:
            raise ContextLengthError(
                f"{param}: the text has {n_bytes} bytes, but at most {most} are tokenised; "
                "shorten it",
                param=param,
            )
        longest = None if most_tokens is None else self._longest_token
        if most_tokens is not None and longest is not None and len(text) > longest * most_tokens:
            raise ContextLengthError(
                f"{context_length(most_tokens)} the text has {len(text)} characters, of which a "
                f"token holds {longest} at most; shorten it",
                param=param,
            )

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.bundle.tokenizer)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens that /tokenize returns and /detokenize takes."""
        return max(MOST_TOKENS, self.limits.prompt)

    def check_token_ids(
        self, token_ids: Collection[int], param: str, of: TransformerConfig | None = None
    ) -> None:
        """Raise InvalidRequestError for an id that is not in the vocabulary; of: an encoder's."""
        size = (of or self.bundle.config).vocab_size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} is not in the vocabulary of {size}", param=param
                )


def _salt(of_caller: bytes, of_request: str) -> bytes:
    """Return a salt of 128 bits for both together, or none for none."""
    if not of_request:
        return of_caller
    return blake2b(of_request.encode(), key=of_caller, digest_size=16).digest()


def _starts(encoding: Encoding) -> list[int]:
    """Return where each token begins in the text; one that the tokenizer added, after the last."""
    starts, end = [], 0
    for start, stop in encoding.offsets:
        starts.append(start if stop else end)
        end = stop or end
    return starts
