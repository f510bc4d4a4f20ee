"""OpenAI's completions: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir.server.api.http.body import TextRoute
from kvasir.server.api.http.pieces import LazyList, compact
from kvasir.server.api.http.responses import STREAMED, finite, served_model, state_of
from kvasir.server.api.http.streams import respond
from kvasir.server.api.openai.answers import Completion
from kvasir.server.api.openai.formatting import JSON, OpenAIFormatter
from kvasir.server.api.openai.schemas import CompletionsBody
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.errors import InvalidRequestError
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.request import CompletionRequest
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.detokenizer import token_name
from kvasir.server.text.fill_in_middle import FORMS, form_of

router = APIRouter(route_class=TextRoute)

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=Completion, responses=STREAMED)
async def completions(request: Request, body: CompletionsBody) -> Response:
    """Continue prompts, as OpenAI does."""
    wanted, body = await prepare_text(request, body)
    formatter = CompletionFormatter(served_model(request), body, state_of(request.scope).id)
    return respond(request, wanted, formatter, stream=body.stream)


async def prepare_text(
    request: Request, body: CompletionsBody
) -> tuple[CompletionRequest, CompletionsBody]:
    """Return the request for texts, and the body as it is answered. Raises InvalidRequestError."""
    served, state = served_model(request), state_of(request.scope)
    grammar = await served.text_worker.call(state.body_size, body.any_grammar)
    if body.suffix:
        body = _filling(body, served.added_ids)
    options = body.options(
        body.prompt,
        served.model_dir.default_sampling,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.scored_prompt,
        add_special_tokens=body.add_special_tokens,
        with_offsets=body.echo and body.logprobs is not None,
        shows_prompt=body.echo or body.return_token_ids,
        grammar=grammar,
        kept_ids=frozenset() if body.skip_special_tokens else served.special_ids,
        target=body.target(),
    )
    return await served.builder.build(options, state), body


def _filling(body: CompletionsBody, added_ids: Mapping[str, int]) -> CompletionsBody:
    """Return a body that asks for the text before its suffix. Raises InvalidRequestError."""
    form = form_of(added_ids)
    if form is None:
        tags = ", ".join(form.before_middle for form in FORMS)
        raise InvalidRequestError(
            f"suffix: this model cannot fill in a middle, for its tokenizer has none of {tags}; "
            "leave it out",
            param="suffix",
        )
    prompts = [form.prompt(str(prompt), body.suffix) for prompt in body.prompt]
    ends = frozenset() if body.ignore_eos else form.ending_ids(added_ids)
    return body.model_copy(
        update={"prompt": prompts, "stop_token_ids": [*body.stop_token_ids, *ends]}
    )


class CompletionFormatter(OpenAIFormatter):
    """The form of a text completion's response."""

    def __init__(self, served: ServedModel, body: CompletionsBody, request_id: str) -> None:
        super().__init__(served, body, f"cmpl-{request_id}", "text_completion")
        self._echoes, self._n_top = body.echo, body.logprobs
        self._begun: set[int] = set()  # choices

    def parts(self, delta: Delta) -> Iterator[JSON]:
        """Yield the new part of a choice; the first begins with the echoed prompt."""
        text, index = delta.text, delta.choice.index
        is_first = index not in self._begun
        self._begun.add(index)
        if self._echoes and is_first:
            text = delta.choice.prompt.text + text
        logprobs = None if self._n_top is None else self._scored(delta)
        reason = delta.finish_reason
        ids = self._token_ids(delta, is_first=is_first)
        if text or logprobs is not None or reason is not None or ids:
            part = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            part |= ids
            score = delta.choice.score
            yield part if score is None else part | {"score": finite(score)}

    def finished(self, choice: JSON) -> JSON:
        """Return a whole choice, with the scores of its prompt if they were asked for."""
        scores = self._prompt_scores.get(choice["index"])
        shown = super().finished(choice)
        return shown if scores is None else shown | {"prompt_logprobs": self._ranks(scores)}

    def encoded(self, part: JSON) -> str:
        """Return a part as JSON. Text alone, the usual case, takes half the time this way."""
        is_text = part["logprobs"] is None and part["finish_reason"] is None
        if not is_text or part.keys() & {"token_ids", "score"}:
            return compact(part)
        text = compact(part["text"])
        return f'{{"index":{part["index"]},"text":{text},"logprobs":null,"finish_reason":null}}'

    def _scored(self, delta: Delta) -> JSON:
        """Return a delta's tokens and their scores; the prompt's are echoed, its first has none."""
        scores: list[TokenLogprobs | None] = []
        ids, offsets, new = list[int](), list[int](), scores[:]
        prompt = delta.choice.prompt
        if self._echoes and delta.prompt_logprobs is not None:
            ids += prompt.ids
            scores += [None, *delta.prompt_logprobs]
            new += [None] * len(ids)
            offsets += prompt.offsets or ()
        if delta.logprobs is not None:
            ids.append(delta.logprobs.token_id)
            scores.append(delta.logprobs)
            new.append(delta.logprobs)
            offsets.append(delta.offset + (len(prompt.text) if self._echoes else 0))
        return {"ids": ids, "scores": scores, "new": new, "offsets": offsets}

    def shown(self, part: JSON) -> JSON:
        """Return a part with OpenAI's parallel lists."""
        if (scored := part["logprobs"]) is None:
            return part
        scores, n_top = scored["scores"], self._n_top or 0
        lists: JSON = {
            "tokens": LazyList(scored["ids"], partial(token_name, self.tokenizer)),
            "token_logprobs": LazyList(scores, lambda scored: finite(scored.logprob)),
            "top_logprobs": LazyList(scores, self._top, n_top) if n_top else None,
            "text_offset": scored["offsets"],
        }
        if n_top and self._with_token_ids:
            lists["top_token_ids"] = LazyList(scored["new"], self._top_ids, n_top)
        return part | {"logprobs": lists}

    def _top(self, scored: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and of the token, by name."""
        top: dict[str, float] = {}
        for token_id, logprob in scored.top[: self._n_top]:
            top.setdefault(token_name(self.tokenizer, token_id), finite(logprob))
        # The token itself is in its place, even if another has the same text.
        return top | {token_name(self.tokenizer, scored.token_id): finite(scored.logprob)}

    def _top_ids(self, scored: TokenLogprobs) -> dict[str, int]:
        """Return the ids of a token and of the likeliest in its place, by name."""
        ids: dict[str, int] = {}
        for token_id in (scored.token_id, *(i for i, _ in scored.top[: self._n_top])):
            ids.setdefault(token_name(self.tokenizer, token_id), token_id)
        return ids
