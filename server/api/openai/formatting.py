"""The form of the responses of OpenAI's routes, but for the parts of their choices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container
from functools import partial
from statistics import fmean
from time import time
from typing import Any

from tokenizers import Tokenizer

from kvasir.server.api.http.pieces import LazyList, Written, compact, together, written
from kvasir.server.api.http.responses import finite
from kvasir.server.api.http.streams import DONE, Formatter, event
from kvasir.server.api.openai.schemas import OpenAIBody
from kvasir.server.engine.sampling.params import TokenLogprobs
from kvasir.server.requests.completion import Delta
from kvasir.server.requests.served_model import ServedModel
from kvasir.server.text.detokenizer import token_bytes, token_text

JSON = dict[str, Any]


class OpenAIFormatter(Formatter):
    """The form of a response around its choices, of which each part is one choice's."""

    end = DONE
    encoded = staticmethod(compact)  # a part as JSON

    def __init__(self, served: ServedModel, body: OpenAIBody, response_id: str, kind: str) -> None:
        super().__init__(served)
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._with_running_usage = options is not None and options.continuous_usage_stats
        self._n_shown = 0  # tokens of the deltas so far; more may have been generated
        self._choices: dict[int, JSON] = {}  # of a whole answer
        self._n_shown_samples, self._n_samples = body.n, body.n_samples
        self._scores: defaultdict[int, list[float]] = defaultdict(list)  # of each choice's tokens
        self._n_prompt_top = body.prompt_logprobs
        self._with_token_ids = body.return_token_ids
        self._prompt_scores: dict[int, list[TokenLogprobs]] = {}  # by choice
        self._head = {
            "id": response_id,
            "object": kind,
            "created": int(time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._prefix = compact(self._head)[:-1]

    def shown(self, part: JSON) -> JSON:
        """Return a part, or all of a choice as one, with its log-probabilities as clients see them.

        Until then they are as the engine gives them, which takes less memory.
        """
        return part

    def finished(self, choice: JSON) -> JSON:
        """Return a whole choice, given all its parts as one."""
        return self.shown(choice)

    def add(self, delta: Delta) -> None:
        """Keep a delta's part of its choice, and its scores."""
        index = delta.choice.index
        if delta.logprobs is not None:
            self._scores[index].append(delta.logprobs.logprob)
        if self._n_prompt_top is not None and delta.prompt_logprobs is not None:
            self._prompt_scores[index] = delta.prompt_logprobs
        super().add(delta)

    def keep(self, part: JSON) -> None:
        """Join a part with its choice."""
        self._choices[part["index"]] = join(self._choices.get(part["index"]), part)

    def chunk(self, delta: Delta) -> Written:
        """Return the events for a delta, each with the usage up to the delta's end if wanted."""
        self._n_shown += delta.n_tokens
        parts, usage = [*self.parts(delta)], ""
        if self._with_running_usage:
            usage = f',"usage":{compact(self._usage(self._n_shown))}'
        elif self._with_usage:
            usage = ',"usage":null'
        return together([self.event(part, usage) for part in parts])

    def event(self, part: JSON, usage: str = "") -> Written:
        """Return the event of a part, with a field of usage after it."""
        head, tail = f'data: {self._prefix},"choices":[', f"]{usage}}}\n\n"
        return written(self.shown(part), self.encoded, head, tail)

    def tail(self) -> bytes:
        """Return the event with the usage, if wanted, and the end."""
        if not self._with_usage:
            return DONE
        usage = self._usage(self.completion.n_completion_tokens)
        return event(compact({**self._head, "choices": [], "usage": usage})) + DONE

    def whole(self) -> JSON:
        """Return the body of a finished completion."""
        choices = [
            self.finished(self._choices[index]) | {"index": place}
            for place, index in enumerate(self._best())
        ]
        usage = self._usage(self.completion.n_completion_tokens)
        return {**self._head, "choices": choices, "usage": usage}

    def _best(self) -> list[int]:
        """Return the choices to show: of each prompt's samples the likeliest, by their mean."""
        indices = [choice.index for choice in self.completion.choices]
        n = self._n_samples
        if n == self._n_shown_samples:
            return indices

        def score(index: int) -> float:
            scores = self._scores[index]
            return fmean(scores) if scores else -math.inf

        samples = (indices[start : start + n] for start in range(0, len(indices), n))
        best = (sorted(some, key=score, reverse=True)[: self._n_shown_samples] for some in samples)
        return [index for some in best for index in some]

    def _token_ids(self, delta: Delta, *, is_first: bool) -> JSON:
        """Return the ids of a delta's tokens, if wanted; in a choice's first the prompt's."""
        if not self._with_token_ids:
            return {}
        prompt = {"prompt_token_ids": delta.choice.prompt.ids} if is_first else {}
        return {"token_ids": [*delta.token_ids], **prompt}

    def _ranks(self, scores: list[TokenLogprobs]) -> LazyList:
        """Return the log-probabilities of a prompt's tokens, the first of which has none."""
        n_top = self._n_prompt_top or 0
        return LazyList([None, *scores], partial(self._ranked, n_top=n_top), 1 + n_top)

    def _ranked(self, scored: TokenLogprobs, n_top: int) -> JSON:
        """Return a token of the prompt and the likeliest in its place, by id, as vLLM does."""
        given = (scored.token_id, scored.logprob, scored.rank)
        top = ((i, logprob, rank) for rank, (i, logprob) in enumerate(scored.top[:n_top], 1))
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_text(self.tokenizer, token_id),
            }
            for token_id, logprob, rank in (given, *top)
        }

    def _usage(self, n_generated: int) -> JSON:
        n_prompt = self.completion.n_prompt_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": self.completion.n_cached_tokens},
        }


def token_logprobs(
    tokenizer: Tokenizer,
    scored: TokenLogprobs,
    hidden_ids: Container[int],
    hidden: list[int] | None = None,
) -> JSON:
    """Return a token with its log-probability and alternatives.

    hidden: the bytes of a token that is not shown.
    """

    def entry(token_id: int, logprob: float) -> JSON:
        is_text = token_id not in hidden_ids
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(token_bytes(tokenizer, token_id)) if is_text else hidden,
        }

    top = [entry(token_id, logprob) for token_id, logprob in scored.top]
    return {**entry(scored.token_id, scored.logprob), "top_logprobs": top}


def join(old: Any, new: Any) -> Any:
    """Return two values as one, and change the old: objects by key, texts and lists end to end.

    Of other values the new one holds, unless it is null.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        old |= {key: join(old.get(key), value) for key, value in new.items()}
    elif isinstance(old, str | list) and type(old) is type(new):
        old += new  # type: ignore[operator]
    else:
        return old if new is None else new
    return old
