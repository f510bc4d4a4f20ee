"""The conversion of chats in JSONL to rows of tokens, of which the assistant's are learned.

A row holds whole conversations one after another; later ones see earlier ones, as documents in
plain text do. Where the next conversation does not fit, its beginning fills the row without being
learned, and the whole of it begins the next row. A conversation longer than a row is cut at its
end.

This module reads the role, content and "weight" (0: an answer that is not learned) of a message,
and the chat template reads the rest; a field that the template does not name is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from kvasir.model.platform.progress import Progress, no_progress
from kvasir.model.platform.suggestions import did_you_mean
from kvasir.model.template.chat_template import REASONING, ChatTemplate, ChatTemplateError
from kvasir.model.tokenizer import special_ids
from kvasir.model.training.data.corpus import CorpusError, read_lines, shuffled
from kvasir.model.training.data.tokens import TokenData, encode, token_type, write_arrays

_WEIGHT = "weight"  # OpenAI's fine-tuning format: 1 if an assistant's message is learned, else 0
# Fields that a template may leave out, or that are not for the template.
_OPTIONAL = {"role", "content", "name", "tool_call_id", _WEIGHT}


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation, and the [start, end) of each learned answer in it."""

    text: str
    spans: list[tuple[int, int]]


# One rendering. Where a template rewrites earlier turns: one per answer, in which only that answer
# is learned.
Conversation = list[Rendering]
_Object = dict[str, Any]
_Tokens = NDArray[np.uint32]  # [2, n]: token ids, and 1 for each that is learned


@dataclass(frozen=True, slots=True)
class PackedChats:
    """Rows of token ids and, beside each token, whether it is learned, both [rows, context + 1]."""

    ids: NDArray[np.uint32]
    learned: NDArray[np.bool_]
    n_train: int  # rows from here on are held out
    n_cut: int
    n_without_answer: int  # conversations that are left out
    ending_ids: set[int]  # special tokens that end answers

    def write(self, folder: Path, tokenizer: Tokenizer) -> TokenData:
        """Write the rows to a new folder, for training."""
        arrays = write_arrays(
            folder,
            tokens=self.ids.astype(token_type(tokenizer)),
            n_train=self.n_train * self.ids.shape[1],
            learned=np.packbits(self.learned, axis=1),
        )
        return TokenData(**arrays)

    @property
    def summary(self) -> str:
        """The rows in words, with a warning where generation will not know where to stop."""
        text = (
            f"{len(self.ids):,} rows, {self.learned.mean():.0%} of their tokens learned; "
            f"{self.n_cut} conversations longer than {self.ids.shape[1] - 1} tokens were cut, "
            f"{self.n_without_answer} without an answer in them left out"
        )
        warning = (
            "\nno answer ends in a special token of the tokenizer, so generation will not know "
            "where to stop; a chat template can end answers with eos_token"
        )
        return text if self.ending_ids else text + warning


def read_conversations(
    paths: Sequence[Path], template: ChatTemplate, seed: int
) -> list[Conversation]:
    """Render every line of the files, shuffled by `seed`. Raises CorpusError naming a bad line."""
    chats = read_lines(paths, lambda line: _render(template, *_parse(line, template)))
    return shuffled(chats, seed)


def _parse(chat: Any, template: ChatTemplate) -> tuple[list[_Object], list[_Object] | None]:
    """Return a line's messages and tools. Raises ValueError saying what is wrong."""
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        chat = '{"messages": [{"role": …, "content": …}, …]}'
        raise ValueError(f"not a chat, {chat}; plain text needs another file name")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {i} must be {{"role": …, "content": …}}, not {message!r}')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {i}'s content must be text, not {message.get('content')!r}")
        weight = message.get(_WEIGHT)
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise ValueError(f"message {i}'s weight must be 0 (not learned) or 1, not {weight!r}")
        if weight and message["role"] != "assistant":
            raise ValueError(f"message {i} has weight 1, but only the assistant's are learned")
        for name in sorted(message.keys() - _OPTIONAL):
            names = REASONING if name in REASONING else (name,)
            is_read = any(alias in template.source for alias in names)
            if message[name] not in (None, "", []) and not is_read:
                unread = f"{name!r}, which the chat template does not read"
                advice = did_you_mean(name, _OPTIONAL, "leave it out")
                raise ValueError(f"message {i} has {unread}; {advice}")
    return messages, chat.get("tools")


def _render(
    template: ChatTemplate, messages: list[_Object], tools: list[_Object] | None
) -> Conversation:
    """Render a conversation; an answer is the text that its message adds to its prompt.

    Where the whole text does not begin with each of these texts (Qwen3's template removes thoughts
    from earlier turns), each answer is learned in the text up to it, as serving prompts for it.
    Raises ChatTemplateError when even that text does not begin with a prompt.
    """
    weights = [message.pop(_WEIGHT, None) for message in messages]
    whole = template.render(messages, tools=tools)
    parts = []
    for i, weight in enumerate(weights):
        if messages[i]["role"] != "assistant" or weight == 0:
            continue
        if i == 0:
            raise ChatTemplateError(
                "message 0 is the assistant's, and there is no prompt before it; begin with "
                'another role, or give it "weight": 0, so that it is not learned'
            )
        prompt = template.render(messages[:i], tools=tools, add_generation_prompt=True)
        text = template.render(messages[: i + 1], tools=tools)
        if not text.startswith(prompt):
            raise ChatTemplateError(
                f"the chat template's text for message {i} does not begin with the prompt for it, "
                "so the answer cannot be found in it; use another --chat-template"
            )
        parts.append(Rendering(text, [(len(prompt), len(text))]))
    if all(whole.startswith(part.text) for part in parts):
        return [Rendering(whole, [span for part in parts for span in part.spans])]
    return parts


def pack(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    held_out: float,
    context: int,
    progress: Progress = no_progress,
) -> PackedChats:
    """Cut conversations into rows of context + 1 tokens, and hold out the last share of them.

    At least one conversation is held out. Raises CorpusError when there are fewer than two to learn
    from, or when the tokenizer joins an answer with its prompt, and TokenizerError.
    """
    special = special_ids(tokenizer)
    size = context + 1
    kept: list[list[_Tokens]] = []
    ending_ids: set[int] = set()
    n_cut = 0
    # Both iterators advance with the loops below.
    renderings = list(chain.from_iterable(conversations))
    encodings = encode([part.text for part in renderings], tokenizer, progress=progress)
    prompts = encode([part.text[:at] for part in renderings for at, _ in part.spans], tokenizer)
    for parts in conversations:
        all_tokens = []
        for part, encoding in zip(parts, encodings, strict=False):
            tokens = np.array([encoding.ids, [0] * len(encoding.ids)], dtype=np.uint32)
            for span, prompt in zip(part.spans, prompts, strict=False):
                _check_boundary(part.text, span, encoding, prompt, tokenizer)
                answer = _answer_tokens(part.text, span, encoding, special)
                tokens[1, answer] = 1
                ending_ids |= special & set(encoding.ids[answer][-1:])
            tokens[1, :1] = 0  # no token predicts the first one
            all_tokens.append(tokens)
        if learned := [tokens[:, :size] for tokens in all_tokens if tokens[1, :size].any()]:
            kept.append(learned)
            n_cut += any(tokens.shape[1] > size for tokens in all_tokens)
    if len(kept) < 2:
        raise CorpusError(
            f"of {len(conversations)} conversations, {len(kept)} have an answer within {context} "
            "tokens, and two are needed, one of them to be held out; add some, or use a longer "
            "context"
        )
    n_held_out = max(1, int(len(kept) * held_out))
    train = list(_fill_rows(list(chain.from_iterable(kept[:-n_held_out])), size))
    held = _fill_rows(list(chain.from_iterable(kept[-n_held_out:])), size)
    ids, mask = np.stack([*train, *held], axis=1)
    n_without_answer = len(conversations) - len(kept)
    return PackedChats(ids, mask > 0, len(train), n_cut, n_without_answer, ending_ids)


def _check_boundary(
    text: str, span: tuple[int, int], encoding: Encoding, prompt: Encoding, tokenizer: Tokenizer
) -> None:
    """Raise CorpusError when a token holds both the end of the prompt and the answer's beginning.

    Serving ends the prompt between them, so it would never ask for the answer as it was learned.
    """
    start, end = span
    if encoding.ids[: len(prompt.ids)] == prompt.ids or not text[start:end][:1].strip():
        return
    # The same text in other tokens is no joint. Offsets alone cannot decide: some tokenizers leave
    # a token's space out of them.
    n_before = next(i for i, (_, last) in enumerate(encoding.offsets) if last > start)
    before = tokenizer.decode(encoding.ids[:n_before], skip_special_tokens=False)
    if before != tokenizer.decode(prompt.ids, skip_special_tokens=False):
        raise CorpusError(
            f"the tokenizer joins the beginning of an answer, {text[start:end][:20]!r}, with the "
            f"end of its prompt, {text[:start][-20:]!r}; use a --chat-template whose generation "
            "prompt ends in a special token, a line break or a colon, not in a space"
        )


def _answer_tokens(
    text: str, span: tuple[int, int], encoding: Encoding, special: set[int]
) -> slice:
    """Return the tokens of an answer: those that begin in the span, up to a special token.

    White space that a template writes after that token is not the assistant's.
    """
    inside = [i for i, (start, _) in enumerate(encoding.offsets) if span[0] <= start < span[1]]
    endings = [i for i in inside if encoding.ids[i] in special]
    if endings and not text[encoding.offsets[endings[-1]][1] : span[1]].strip():
        inside = [i for i in inside if i <= endings[-1]]
    return slice(inside[0], inside[-1] + 1) if inside else slice(0)


def _fill_rows(parts: Sequence[_Tokens], size: int) -> Iterator[_Tokens]:
    """Yield rows of whole parts; the part that does not fit fills the rest, again and again."""
    row: list[_Tokens] = []
    length = 0
    for part in (*parts, None):
        if part is None or (row and length + part.shape[1] > size):
            filler = np.resize((row[0] if part is None else part)[0], size - length)
            yield np.concatenate([*row, np.stack((filler, np.zeros_like(filler)))], axis=1)
            row, length = [], 0
        if part is not None:
            row.append(part)
            length += part.shape[1]
