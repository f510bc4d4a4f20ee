"""What the handlers share: one model, its engine, the door in front of it, and the phases of its life."""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import time
from typing import Any, TypeVar

from tokenizers import Encoding

from model.bundle import CHAT_TEMPLATE_FILE, ModelBundle
from model.chat_template import ChatTemplate, ChatTemplateError
from model.tokenizer import keep_spaces_in_offsets
from server.engine.engine import Engine
from server.errors import DeadlineExceededError, InvalidRequestError, StartupError, UnavailableError
from server.requests.admission import Admission, Phase, check_length, check_prompt_length
from server.requests.async_engine import AsyncEngine
from server.requests.completion import Completion, CompletionRequest, Prompt, make_choices
from server.requests.grammars import Grammars
from server.settings import Settings
from server.telemetry.start_clock import StartClock
from server.text.chat_format import ChatFormat

logger = logging.getLogger("kvasir")

T = TypeVar("T")
_Encoded = tuple[list[int], list[int] | None]  # ids, and where in the text their tokens begin

_SHORT_TEXT = 4096  # characters that are tokenised at once, without leaving the event loop
_ABORT_SECONDS = 5.0  # for the engine to come out of its step and end the last requests


class Service:
    def __init__(self, settings: Settings, bundle: ModelBundle) -> None:
        self.settings = settings
        self.bundle = bundle
        keep_spaces_in_offsets(bundle.tokenizer)
        self.created = int(time())
        self.on_load_failure: Callable[[Exception], None] = _report
        added = bundle.tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.grammars = Grammars(bundle)
        self.chat = _chat_format(settings, bundle)
        self.engine = AsyncEngine()
        self.metrics = self.engine.metrics
        self.admission = Admission(
            max_num_seqs=settings.max_num_seqs,
            max_queue=settings.queue_limit,
            max_queue_tokens=settings.queue_tokens_limit,
        )
        self.metrics.info("build", "The software.", {"version": version("kvasir-lm")})
        self.metrics.info("model", "The model.", self.describe_model())

    @property
    def is_ready(self) -> bool:
        return self.admission.phase is Phase.READY and self.engine.is_healthy

    @property
    def has_started(self) -> bool:
        return self.admission.phase is not Phase.LOADING

    @property
    def max_model_len(self) -> int:
        if self.engine.engine is not None:
            return self.engine.engine.max_model_len
        longest = self.bundle.config.max_model_len
        return min(longest, self.settings.max_model_len or longest)

    def describe_model(self) -> dict[str, str]:
        manifest = self.bundle.manifest
        return {
            "model": self.settings.model_name,
            "precision": manifest.precision,
            "device": manifest.device,
        }

    async def start(self, build: Callable[[], Engine], clock: StartClock) -> None:
        """Build the engine in its thread, then open the door; what `build` raises goes to `on_load_failure`.

        The log says with the clock's laps where the time went.
        """
        try:
            await self.engine.start(build)
        except Exception as error:
            self.on_load_failure(error)
            return
        if self.admission.phase is Phase.LOADING:
            self.admission.phase = Phase.READY
            logger.info(
                "ready",
                extra={"fields": self.describe_model() | {"start_seconds": clock.rounded()}},
            )

    async def drain(self) -> None:
        """Refuse new requests, end queued ones, give running ones `drain_timeout`, then end the rest."""
        self.admission.phase = Phase.DRAINING
        self.engine.abort_waiting()
        if await self._is_empty_within(self.settings.drain_timeout):
            return
        self.engine.abort_all()
        fields = {"sequences": self.admission.n_inside}
        logger.warning("drain timeout: ending what still runs", extra={"fields": fields})
        if not await self._is_empty_within(_ABORT_SECONDS):
            self.engine.give_up()

    async def _is_empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.admission.wait_until_empty()
        except TimeoutError:
            return False
        return True

    async def prompt(self, source: str | list[int], **options: Any) -> Prompt:
        """One of `prompts`."""
        (prompt,) = await self.prompts([source], **options)
        return prompt

    async def prompts(
        self,
        sources: Sequence[str | list[int]],
        *,
        keep_last: int | None = None,
        add_special_tokens: bool = True,
        with_places: bool = False,
    ) -> list[Prompt]:
        """Prompts from texts or token ids, each cut to its last `keep_last` tokens. Raises InvalidRequestError.

        add_special_tokens: those that the tokenizer puts around a text, such as BOS. with_places: of tokens in texts.
        """
        texts = [source for source in sources if isinstance(source, str)]
        encoded = iter(await self._tokenise(texts, add_special_tokens, with_places))
        return [
            self._prompt(
                s, *(next(encoded) if isinstance(s, str) else (s, None)), keep_last=keep_last
            )
            for s in sources
        ]

    async def _tokenise(
        self, texts: list[str], add_special_tokens: bool, with_places: bool
    ) -> list[_Encoded]:
        tokenizer = self.bundle.tokenizer
        if sum(map(len, texts)) <= _SHORT_TEXT:
            encodings = [
                tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        else:  # in a thread `encode` would still keep the interpreter to itself; of a batch, also of one, it lets go
            encode = tokenizer.encode_batch if with_places else tokenizer.encode_batch_fast
            encodings = await asyncio.to_thread(
                encode, texts, add_special_tokens=add_special_tokens
            )
        return [
            (encoding.ids, _places(encoding) if with_places else None) for encoding in encodings
        ]

    def _prompt(
        self,
        source: str | list[int],
        ids: list[int],
        places: list[int] | None,
        *,
        keep_last: int | None,
    ) -> Prompt:
        is_cut = keep_last is not None and len(ids) > keep_last
        if keep_last is not None and is_cut:
            ids = ids[-keep_last:]
        check_prompt_length(len(ids), self.max_model_len)
        if isinstance(source, str) and not is_cut:
            return Prompt(ids, source, places)
        self.check_token_ids(ids, "prompt")
        return Prompt(ids, self.bundle.tokenizer.decode(ids))

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """The result of work on `size` characters or tokens, done in a thread where they are many."""
        return work() if size <= _SHORT_TEXT else await asyncio.to_thread(work)

    def default_max_tokens(self, prompts: list[Prompt], usual: int) -> int:
        """The usual number of new tokens, or what model and memory leave room for behind the longest prompt, if any."""
        longest = max(len(prompt.ids) for prompt in prompts)
        most = min(usual, self.max_model_len - longest)
        if (engine := self.engine.engine) is not None:
            needed = partial(engine.kv.n_needed, longest)
            most = bisect_right(range(1, most + 1), engine.kv.budget_tokens, key=needed)
        return max(1, most)

    def deadline(self, arrived: float, milliseconds: int | None) -> float | None:
        """When the time is over that a request has from its arrival on, by its own word or by default."""
        wanted = self.settings.default_timeout_ms if milliseconds is None else milliseconds
        return None if wanted is None else arrived + wanted / 1000

    def check_token_ids(self, token_ids: Iterable[int], param: str) -> None:
        """Raises InvalidRequestError for an id that the model does not have."""
        size = self.bundle.config.vocab_size
        if unknown := next((i for i in token_ids if not 0 <= i < size), None):
            raise InvalidRequestError(
                f"{param}: token id {unknown} is not in the vocabulary of {size}", param=param
            )

    def _check_endings(self, request: CompletionRequest) -> None:
        """Until there are `min_tokens`, what would end the text is banned: that must not be everything."""
        config = self.bundle.config
        if (
            request.params.min_tokens
            and len(request.ending_ids(config.eos_token_ids)) >= config.vocab_size
        ):
            raise InvalidRequestError(
                f"stop_token_ids: all {config.vocab_size} tokens would end the text, "
                "which min_tokens forbids at first; name fewer",
                param="stop_token_ids",
            )

    @asynccontextmanager
    async def complete(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        """Run a request; leaving the block ends it, however far it is. Raises the errors of admission."""
        self.admission.check_open()
        engine = self.engine.engine
        if engine is None:  # closed while it loaded
            raise UnavailableError(Phase.LOADING.value)
        for prompt in request.prompts:
            check_length(len(prompt.ids), request.params.max_tokens, engine)
        self._check_endings(request)
        constraint, demand = None, request.demand
        if request.grammar is not None and demand.work.seconds_left > 0:
            self.admission.check(demand, self.engine.snapshot())  # before work on it
            constraint = await self.grammars.constraint(request)
            demand = request.demand
        if demand.work.seconds_left <= 0:
            raise DeadlineExceededError(
                "the deadline passed while the prompt was read; allow more time, or try later"
            )
        with self.admission.admit(demand, self.engine.snapshot()) as patience:
            first_id = self.engine.new_ids(request.n_sequences)
            choices = make_choices(
                request,
                self.bundle.tokenizer,
                first_id,
                self.bundle.config.eos_token_ids,
                constraint,
            )
            stream = self.engine.submit([choice.sequence for choice in choices])
            completion = Completion(choices, stream)
            left = demand.work.seconds_left
            timers = expire(completion, patience, left) if left < math.inf else []
            try:
                yield completion
            finally:
                for timer in timers:
                    timer.cancel()
                stream.close()


def expire(completion: Completion, patience: float, left: float) -> list[asyncio.TimerHandle]:
    """End it when its deadline has passed, and before where it waits and what it needs would come too late."""

    def shed() -> None:
        if completion.is_waiting:
            completion.stream.expire()

    loop = asyncio.get_running_loop()
    timers = [loop.call_later(left, completion.stream.expire)]
    return [*timers, loop.call_later(max(0.0, patience), shed)] if patience < left else timers


def _places(encoding: Encoding) -> list[int]:
    """Where in the text each token begins; one that the tokenizer added is behind what came before it."""
    places, end = [], 0
    for start, stop in encoding.offsets:
        places.append(start if stop else end)
        end = stop or end
    return places


def onnxruntime_version() -> str | None:
    """Of the runtime that is installed, for whichever device."""
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _chat_format(settings: Settings, bundle: ModelBundle) -> ChatFormat | None:
    if bundle.chat_template is None:
        return None
    try:
        template = ChatTemplate(bundle.chat_template, bundle.special_tokens)
    except ChatTemplateError as error:
        path = bundle.path / CHAT_TEMPLATE_FILE
        raise StartupError(f"{path}: {error}; mend it, and export the model again") from None
    return ChatFormat(template, settings.tool_call_format)


def _report(error: Exception) -> None:
    logger.error("the model could not be loaded: %s", error)
