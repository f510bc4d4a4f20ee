"""Prompts: texts and token ids, tokenised within limits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Encoding

from kvasir.model.config import TransformerConfig
from kvasir.model.directory import ModelDirectory
from kvasir.model.tokenizer import longest_token
from kvasir.server.engine.model_runner import ContextLimits
from kvasir.server.errors import ContextLengthError, InvalidRequestError
from kvasir.server.requests.admission.queue import context_length
from kvasir.server.requests.request import Prompt
from kvasir.server.requests.target import source_ids
from kvasir.server.requests.text_worker import SHORT, TextWorker
from kvasir.server.settings import Settings
from kvasir.server.text.detokenizer import decoded_starts

MOST_BYTES, MOST_BYTES_PER_TOKEN = 2**18, 8  # of a text that is tokenised
MOST_TOKENS = 2**17  # of a list, if the model takes no more


@dataclass(frozen=True)
class PromptReader:
    """A reader of texts and token ids for one model."""

    settings: Settings
    model_dir: ModelDirectory
    text_worker: TextWorker

    @property
    def max_model_len(self) -> int:
        """The maximum number of tokens of a prompt and its completion."""
        longest = self.model_dir.config.max_model_len
        return min(longest, self.settings.max_model_len or longest)

    @property
    def limits(self) -> ContextLimits:
        """The maximum numbers of tokens."""
        encoder = self.model_dir.config.encoder
        if encoder is None:
            return ContextLimits(self.max_model_len)
        longest = min(encoder.max_model_len, self.settings.max_model_len or encoder.max_model_len)
        return ContextLimits(self.max_model_len, longest)

    async def tokenize_target(self, text: str, param: str) -> list[int]:
        """Return the tokens of text that comes after a prompt, or in a target; see `tokenize`."""
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
        if source_language is not None and not all(isinstance(source, str) for source in sources):
            raise InvalidRequestError(
                "source_language is for texts; put its token among those of the prompt",
                param="source_language",
            )
        most = most or self.limits.prompt
        tokenizer = self.model_dir.tokenizer

        def work() -> list[Prompt]:
            texts = [source for source in sources if isinstance(source, str)]
            for text in texts:
                self.check_text(text, param, most if keep_last is None else None)
            encoded = self._encode(texts, add_special_tokens, with_offsets)
            return [prompt(source, encoded) for source in sources]

        def prompt(source: str | list[int], encoded: Iterator[Encoding]) -> Prompt:
            if isinstance(source, list):
                ids, text, offsets = source, None, None
            else:
                encoding, text = next(encoded), source
                ids, offsets = encoding.ids, _starts(encoding) if with_offsets else None
                if source_language is not None:
                    ids = source_ids(tokenizer, encoding, source_language)
            if keep_last is not None and len(ids) > keep_last:
                ids, text = ids[-keep_last:], None
            if len(ids) > most:  # even without new tokens
                raise ContextLengthError(
                    f"{context_length(most)} the {param} has {len(ids)}; shorten it", param=param
                )
            if text is None:
                self.check_token_ids(ids, param, self.model_dir.config.encoder)
                text = tokenizer.decode(ids)
                offsets = decoded_starts(tokenizer, ids) if with_offsets else None
            return Prompt(ids, text, offsets)

        return await self.text_worker.call(sum(map(len, sources)), work)

    def _encode(
        self, texts: list[str], add_special_tokens: bool, with_offsets: bool
    ) -> Iterator[Encoding]:
        tokenizer = self.model_dir.tokenizer
        if sum(map(len, texts)) <= SHORT:
            return (tokenizer.encode(t, add_special_tokens=add_special_tokens) for t in texts)
        # Only the batch methods, even for one text, release the interpreter's lock.
        encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
        return iter(encode(texts, add_special_tokens=add_special_tokens))

    def check_text(self, text: str, param: str, most_tokens: int | None = None) -> None:
        """Raise ContextLengthError, before a text is tokenised, if it is too long for that.

        most_tokens: that it may have; None if the model need not read all of them.
        """
        if len(text) <= SHORT:  # cheap, and the error has the number of tokens
            return
        most = max(MOST_BYTES, MOST_BYTES_PER_TOKEN * self.limits.prompt)
        if (n_bytes := len(text.encode())) > most:
            raise ContextLengthError(
                f"{context_length(most_tokens or self.limits.prompt)} the text has {n_bytes} "
                f"bytes, of which at most {most} are tokenised; shorten it",
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
        return longest_token(self.model_dir.tokenizer)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens that /tokenize returns and /detokenize takes."""
        return max(MOST_TOKENS, self.limits.prompt)

    def check_token_ids(
        self, token_ids: Collection[int], param: str, config: TransformerConfig | None = None
    ) -> None:
        """Raise InvalidRequestError for an id outside the vocabulary. config: an encoder's."""
        size = (config or self.model_dir.config).vocab_size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} is not in the vocabulary of {size}", param=param
                )


def _starts(encoding: Encoding) -> list[int]:
    """Return where each token begins in the text; one that the tokenizer added, after the last."""
    starts, end = [], 0
    for start, stop in encoding.offsets:
        starts.append(start if stop else end)
        end = stop or end
    return starts
