"""One served model: its engine, its admission, and the phases of its life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, time
from typing import Any, Literal

from kvasir.model.directory import CHAT_TEMPLATE_FILE, ModelDirectory
from kvasir.model.platform.machine import return_freed_memory
from kvasir.model.template.chat_template import ChatTemplate, ChatTemplateError
from kvasir.model.tokenizer import keep_spaces_in_offsets
from kvasir.server.engine.encoder.sequence import EncoderOutput
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import Floats
from kvasir.server.engine.sequence import Sequence
from kvasir.server.errors import DeadlineExceededError, StartupError
from kvasir.server.requests.admission.answers import AnswerMemory
from kvasir.server.requests.admission.callers import Reservation
from kvasir.server.requests.admission.queue import Admission, Phase, check_length
from kvasir.server.requests.async_engine import AnyEngine, AsyncEngine, OutputStream
from kvasir.server.requests.builder import RequestBuilder
from kvasir.server.requests.completion import (
    Completion,
    make_choices,
    raise_failure,
    start_timers,
)
from kvasir.server.requests.grammars import Grammars
from kvasir.server.requests.request import CompletionRequest, EmbeddingRequest, Request
from kvasir.server.requests.text_worker import TextWorker
from kvasir.server.settings import Settings
from kvasir.server.telemetry.metrics import Metrics
from kvasir.server.telemetry.server_metrics import ServerMetrics
from kvasir.server.telemetry.start_clock import StartClock
from kvasir.server.text.chat_format import ChatFormat

logger = logging.getLogger("kvasir")

Task = Literal["generate", "embed", "classify"]
Kind = Literal["chat", "complete", "translate", "embed", "rank", "classify"]
_ABORT_SECONDS = 5.0  # for the engine to end its step and the last requests


class ServedModel:
    """The parts of a served model that the routes share. Raises StartupError for a bad template.

    What the models of a server share comes from `ModelRegistry`; a lone model has its own.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: ModelDirectory,
        name: str | None = None,
        metrics: ServerMetrics | None = None,
        text_worker: TextWorker | None = None,
        answers: dict[bool, AnswerMemory] | None = None,
    ) -> None:
        self._given = settings
        self.name = name or settings.model_name
        self.engine = AsyncEngine(partial(Metrics, server=metrics, model=self.name))
        self.metrics = self.engine.metrics
        self.text_worker = text_worker or TextWorker()
        self.answers = answers or AnswerMemory.pots(self.text_worker)
        try:
            self.use(model_dir)
        except BaseException:
            self.metrics.end()
            raise

    def renewed(self, model_dir: ModelDirectory) -> ServedModel:
        """Return another version of the model, to be loaded. Raises StartupError."""
        shared = self.metrics.server, self.text_worker, self.answers
        return ServedModel(self._given, model_dir, self.name, *shared)

    def use(self, model_dir: ModelDirectory) -> None:
        """Take a model directory, while no engine is loaded. Raises StartupError."""
        settings = self._given
        chat = chat_format(settings, model_dir)
        self.settings = settings.of_model(has_encoder=model_dir.config.encoder is not None)
        self.model_dir, manifest = model_dir, model_dir.manifest
        self.adapted: dict[str, tuple[object, ServedModel | None]] = {}  # by AdaptedModels
        self.created = int(time())
        installed, verified = onnxruntime_version(), manifest.versions.get("onnxruntime")
        if verified not in (None, installed):
            fields = {"model": self.name, "installed": installed, "verified_with": verified}
            message = "another ONNX Runtime than the model was verified with"
            logger.warning(message, extra={"fields": fields})
        keep_spaces_in_offsets(model_dir.tokenizer)
        added = model_dir.tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.grammars = Grammars(model_dir)
        self.chat = chat
        makes_text = self.task == "generate"
        self.admission = Admission(
            max_num_seqs=self.settings.max_num_seqs,
            max_queue=self.settings.queue_limit if makes_text else settings.text_queue_limit,
            max_queue_tokens=self.settings.queue_tokens_limit,
        )
        self.builder = RequestBuilder(
            self.settings, model_dir, self.text_worker, self.engine, self.admission, self.answers
        )
        self.metrics.describe(precision=manifest.precision, device=manifest.device)
        vars(self).pop("fingerprint", None)

    @property
    def task(self) -> Task:
        """The purpose of the model, which its routes ask for."""
        pooling = self.model_dir.config.pooling
        if pooling is None:
            return "generate"
        return "classify" if pooling.labels else "embed"

    @property
    def kind(self) -> Kind:
        """The use of the model: its task, more exactly."""
        config = self.model_dir.config
        if config.pooling is not None:
            if not config.pooling.labels:
                return "embed"
            return "rank" if len(config.pooling.labels) == 1 else "classify"
        if config.encoder is not None:
            return "translate"
        return "complete" if self.chat is None else "chat"

    def describe_model(self) -> dict[str, str]:
        """Return the model's name, precision and device."""
        manifest = self.model_dir.manifest
        return {"model": self.name, "precision": manifest.precision, "device": manifest.device}

    @property
    def kernels(self) -> str | None:
        """The instructions of our own operators; None for stock ones, and while it loads."""
        library = self.engine.engine.library if self.engine.engine else None
        return library.path if library else None

    @property
    def speculates(self) -> bool | None:
        """True if text is drafted; None while it loads."""
        engine = self.engine.engine
        return None if engine is None else isinstance(engine, Engine) and engine.speculate

    @cached_property
    def fingerprint(self) -> str:
        """A name of the files and software, whose answers to the same seed are the same."""
        engine = self.engine.engine
        library = engine.library if engine else None
        rounds_by_load = (
            isinstance(engine, Engine) and engine.speculate and not engine.runner.drafts_exactly
        )
        versions = (version("kvasir-lm"), onnxruntime_version(), library and library.version)
        parts = (self.model_dir.manifest.model_dump_json(), *versions, rounds_by_load)
        return f"fp_{sha256(repr(parts).encode()).hexdigest()[:12]}"

    async def start(self, build: Callable[[], AnyEngine], clock: StartClock) -> None:
        """Build the engine in its thread, then accept requests, and log the clock's laps.

        Raises what `build` raises.
        """
        await self.engine.start(build)
        return_freed_memory()  # what only loading needed
        if self.admission.phase is Phase.LOADING:
            self.admission.phase = Phase.READY
            fields: dict[str, Any] = {"kernels": self.kernels, "speculate": self.speculates}
            fields["start_seconds"] = clock.rounded()
            if isinstance(engine := self.engine.engine, Engine):
                self.metrics.state_bytes.set(engine.kv.state_bytes)
                if (cache := engine.kv.cache).capacity:
                    server = self.metrics.server
                    server.show_cache(self.name, cache.block_size, cache.capacity)
                fields["kv_cache"] = engine.kv.sizes
            logger.info("ready", extra={"fields": self.describe_model() | fields})

    async def stop(self) -> None:
        """Free the memory of the engine and of grammars; it may be started again.

        No request may run. An engine that hangs stays.
        """
        if self.admission.phase is Phase.READY:
            self.admission.phase = Phase.LOADING
        await self.engine.stop()
        await asyncio.to_thread(self.grammars.close)
        self.grammars = Grammars(self.model_dir)
        return_freed_memory()

    async def drain(self) -> None:
        """Refuse new requests, end queued ones, and end running ones after `drain_timeout`."""
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
        with suppress(TimeoutError):
            await asyncio.wait_for(self.admission.empty.wait(), seconds)
        return not self.admission.n_inside

    @asynccontextmanager
    async def complete(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        """Run a request until the block is left. Raises the errors of admission."""
        self.admission.check_open()
        engine = self.engine.engine
        assert isinstance(engine, Engine)
        params, n_given = request.params, len(request.target_prefix)
        for prompt in request.prompts:
            n = len(prompt.ids)
            check_length(n, params.max_tokens, engine, n_given, params.n_rows, request.length_param)
        async with request.caller.tokens(request.most_tokens) as reservation:
            constraint, work = None, request.work
            if request.grammar is not None and work.seconds_left > 0:
                self.admission.check(request, work, self.engine.snapshot())
                constraint = await self.grammars.constraint(request)
            with self._admitted(request) as max_wait:
                tokenizer = self.model_dir.tokenizer
                choices = make_choices(request, tokenizer, self.engine.ids, constraint)
                sequences = list(dict.fromkeys(choice.sequence for choice in choices))
                with self._running(request, sequences, max_wait, reservation) as stream:
                    yield Completion(choices, stream)

    async def embed(self, request: EmbeddingRequest) -> list[Floats]:
        """Return what a request asks for of each text, in their order.

        Texts that have not run when the task is cancelled never will. Raises the errors of
        admission, DeadlineExceededError, UnavailableError (shutdown) and EngineError.
        """
        self.admission.check_open()
        async with request.caller.tokens(request.most_tokens) as reservation:
            with self._admitted(request) as max_wait:
                sequences, vectors = request.make_sequences(self.engine.ids), dict[int, Floats]()
                with self._running(request, sequences, max_wait, reservation) as stream:
                    while len(vectors) < len(sequences):
                        for output in await stream.receive():
                            raise_failure(output.finish_reason)
                            assert isinstance(output, EncoderOutput)
                            assert output.vectors is not None
                            vectors[output.sequence_id] = output.vectors
                return [vectors[sequence.id] for sequence in sequences]

    @contextmanager
    def _admitted(self, request: Request) -> Iterator[float]:
        """Hold a request's places until the block is left; yield how long it may wait for them."""
        work = request.work
        if work.seconds_left <= 0:
            raise DeadlineExceededError(
                "the deadline passed while the prompt was read; allow more time, or try later"
            )
        with self.admission.admit(request, work, self.engine.snapshot()) as max_wait:
            yield max_wait

    @contextmanager
    def _running(
        self,
        request: Request,
        sequences: list[Sequence],
        max_wait: float,
        reservation: Reservation,
    ) -> Iterator[OutputStream]:
        """Run a request's sequences until the block is left, and count its tokens."""
        stream = self.engine.submit(sequences)
        timers = start_timers(stream, max_wait, request.deadline - perf_counter())
        try:
            yield stream
        finally:
            for timer in timers:
                timer.cancel()
            stream.close()
            n_prompt, n_generated = request.n_prompt_tokens, stream.n_generated
            reservation.n_used = n_prompt + n_generated
            self.metrics.used(request.caller.name, n_prompt, n_generated)


def onnxruntime_version() -> str | None:
    """Return the version of the installed ONNX Runtime, for CPU or CUDA; None without one."""
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def chat_format(settings: Settings, model_dir: ModelDirectory) -> ChatFormat | None:
    """Return the form of a model's chats, if it has a template. Raises StartupError."""
    if model_dir.chat_template is None:
        return None
    try:
        template = ChatTemplate(model_dir.chat_template, model_dir.special_tokens)
        return ChatFormat(template, settings.tool_call_format, settings.reasoning_format)
    except ChatTemplateError as error:
        path = model_dir.path / CHAT_TEMPLATE_FILE
        raise StartupError(f"{path}: {error}; mend it, and export the model again") from None
