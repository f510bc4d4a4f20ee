"""Chats in JSONL to rows of tokens, of which the assistant's are learnt.

A row holds whole conversations, one after another; later ones see earlier ones, as documents in plain text do. Where
the next one does not fit, its beginning fills the row without being learnt, and it comes whole in the next row. One
that is longer than a row is cut at its end.

Of a message, its role, content and "weight" (0: an answer that is not learnt) are read here, and the rest by the chat
template; a field that the template does not name is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from model.chat_template import REASONING, ChatTemplate, ChatTemplateError
from model.training.data import (
    SHARD_TOKENS,
    CorpusError,
    TokenData,
    encode,
    token_type,
    write_shards,
)

SUFFIX = ".jsonl"
_WEIGHT = "weight"  # of an assistant's message, as OpenAI's fine-tuning has it: 0 or 1, whether it is learnt
# Of a message: what a template may leave out without changing what was meant, and what is not for the template.
_OPTIONAL = {"role", "content", "name", "tool_call_id", _WEIGHT}


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation, and which characters of it, from and to, are learnt of what the assistant says."""

    text: str
    spans: list[tuple[int, int]]


# The whole of it; or, where a template rewrites earlier turns, one rendering up to each answer, which alone is learnt.
Conversation = list[Rendering]


@dataclass(frozen=True, slots=True)
class Chats:
    """Rows of tokens and, beside each token, whether it is learnt, both [rows, context + 1]; and what became of them.

    ending_ids: special tokens that end what the assistant says.
    """

    ids: NDArray[np.unsignedinteger]
    learnt: NDArray[np.bool_]
    n_held_out: int  # of the rows, the last ones
    n_cut: int
    n_without_answer: int
    ending_ids: set[int]


class _Tokens(NamedTuple):
    """Token ids and, for each, whether it is learnt: of a conversation, or of a row."""

    ids: NDArray[np.unsignedinteger]
    learnt: NDArray[np.bool_]


def are_chats(paths: Sequence[Path]) -> bool:
    """Whether a corpus is JSONL files, named outright. Raises CorpusError when only some of it is."""
    chats = [path for path in paths if path.suffix == SUFFIX and not path.is_dir()]
    if chats and len(chats) < len(paths):
        raise CorpusError(
            f"{chats[0]} is for chats, which cannot be mixed with text; train on one, then the other"
        )
    return bool(chats)


def read_conversations(
    paths: Sequence[Path], template: ChatTemplate, seed: int
) -> list[Conversation]:
    """Render every line of the files, shuffled by `seed`. Raises CorpusError naming the line that is not a chat."""
    conversations = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    conversations.append(_render(template, *_parse(line, template)))
                except ValueError as error:
                    raise CorpusError(f"{path}:{number}: {error}") from None
    if not conversations:
        raise CorpusError(f"no chats in {', '.join(map(str, paths))}")
    order = np.random.default_rng(seed).permutation(len(conversations))
    return [conversations[i] for i in order]


def _parse(
    line: str, template: ChatTemplate
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The line's messages and tools. Raises ValueError saying what is wrong."""
    try:
        chat = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            'not a chat, {"messages": [{"role": …, "content": …}, …]}; text goes into files of other names'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {i} must be {{"role": …, "content": …}}, not {message!r}')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {i}'s content must be text, not {message.get('content')!r}")
        _check_fields(i, message, template)
    return messages, chat.get("tools")


def _check_fields(i: int, message: dict[str, Any], template: ChatTemplate) -> None:
    """Raises ValueError for a field that would be passed over, as if the message did not have it."""
    weight = message.get(_WEIGHT)
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"message {i}'s weight must be 0 (do not learn it) or 1, not {weight!r}")
    if weight and message["role"] != "assistant":
        raise ValueError(f"message {i} has weight 1, but only what the assistant says is learnt")
    for name, value in message.items():
        names = REASONING if name in REASONING else (name,)
        if (
            name not in _OPTIONAL
            and value not in (None, "", [])
            and not any(one in template.source for one in names)
        ):
            raise ValueError(
                f"message {i} has {name!r}, which the chat template does not read; leave it out"
            )


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Conversation:
    """The assistant's part of a message is what its text adds to the one that asks for it.

    Where the text of all messages does not just add to that (Qwen3's template takes thoughts out of earlier turns),
    each answer is learnt in the text up to it, as serving asks for it. Raises ChatTemplateError when even there an
    answer does not add to what asks for it, or nothing asks for it.
    """
    learnt = [i for i, message in enumerate(messages) if _is_learnt(message)]
    messages = [
        {name: value for name, value in message.items() if name != _WEIGHT} for message in messages
    ]
    text = template.render(messages, tools=tools)
    parts = []
    for i in learnt:
        if i == 0:
            raise ChatTemplateError(
                "message 0 is the assistant's, and nothing comes before that it answers; begin with another role's, or "
                'give it "weight": 0, so that it is not learnt'
            )
        asked = template.render(messages[:i], tools=tools, add_generation_prompt=True)
        answered = template.render(messages[: i + 1], tools=tools)
        if not answered.startswith(asked):
            raise ChatTemplateError(
                f"what the chat template makes of message {i} does not begin with what asks for it, so what the "
                "assistant says cannot be told; use another --chat-template"
            )
        parts.append(Rendering(answered, [(len(asked), len(answered))]))
    if all(text.startswith(part.text) for part in parts):
        return [Rendering(text, [span for part in parts for span in part.spans])]
    return parts


def _is_learnt(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get(_WEIGHT) != 0


def pack(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, *, held_out: float, context: int
) -> Chats:
    """Cut conversations into rows of context + 1 tokens; the last share of them, at least one, is held out.

    Raises CorpusError when there are fewer than two to learn from, or when the tokenizer joins an answer with what asks
    for it, and TokenizerError.
    """
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    dtype = token_type(tokenizer)
    kept: list[list[_Tokens]] = []
    ending_ids: set[int] = set()
    n_cut = 0
    # Both go on from conversation to conversation.
    encodings = encode((part.text for parts in conversations for part in parts), tokenizer)
    prompts = encode(
        (part.text[:s] for parts in conversations for part in parts for s, _ in part.spans),
        tokenizer,
    )
    for parts in conversations:
        kept_parts = []
        longest = 0
        for part, encoding in zip(parts, encodings, strict=False):
            ids = np.array(encoding.ids, dtype=dtype)[: context + 1]
            learnt = np.zeros(len(encoding.ids), dtype=np.bool_)
            for span, prompt in zip(part.spans, prompts, strict=False):
                _refuse_a_joint(part.text, span, encoding, prompt, tokenizer)
                said = _said(part.text, span, encoding, special)
                learnt[said] = True
                ending_ids |= special & set(encoding.ids[said.stop - 1 : said.stop])
            learnt[:1] = False  # nothing of its own comes before it
            longest = max(longest, len(encoding.ids))
            if learnt[: context + 1].any():
                kept_parts.append(_Tokens(ids, learnt[: context + 1]))
        if kept_parts:
            kept.append(kept_parts)
            n_cut += longest > context + 1
    if len(kept) < 2:
        raise CorpusError(
            f"of {len(conversations)} conversations, {len(kept)} have an answer within {context} tokens, and two are "
            "needed, one of them to be held out; add some, or use a longer context"
        )
    n_held_out = max(1, int(len(kept) * held_out))
    train, held = (
        list(_fill_rows([tokens for conversation in share for tokens in conversation], context + 1))
        for share in (kept[:-n_held_out], kept[-n_held_out:])
    )
    return Chats(
        np.stack([row.ids for row in (*train, *held)]),
        np.stack([row.learnt for row in (*train, *held)]),
        n_held_out=len(held),
        n_cut=n_cut,
        n_without_answer=len(conversations) - len(kept),
        ending_ids=ending_ids,
    )


def _refuse_a_joint(
    text: str, span: tuple[int, int], encoding: Encoding, prompt: Encoding, tokenizer: Tokenizer
) -> None:
    """Raises CorpusError when an answer's first word is in a token that begins before it: serving ends the prompt
    there, in other tokens, and what was learnt would never be asked for.
    """
    asked, said = text[: span[0]], text[slice(*span)]
    if encoding.ids[: len(prompt.ids)] == prompt.ids or not said[:1].strip():
        return
    # The same text in other tokens is no joint. Offsets alone cannot tell: some tokenizers leave a token's space out.
    n_before = next(i for i, (_, end) in enumerate(encoding.offsets) if end > span[0])
    before, wanted = (
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (encoding.ids[:n_before], prompt.ids)
    )
    if before != wanted:
        raise CorpusError(
            f"the tokenizer joins the beginning of an answer, {said[:20]!r}, with the end of what asks for it, "
            f"{asked[-20:]!r}; use a --chat-template whose generation prompt ends in a special token, a line break or "
            "a colon, not in a space"
        )


def _said(text: str, span: tuple[int, int], encoding: Encoding, special: set[int]) -> slice:
    """The tokens that begin within a span of characters, up to the special token that ends it: white space that a
    template writes after that one, the assistant never says.
    """
    inside = [i for i, (start, _) in enumerate(encoding.offsets) if span[0] <= start < span[1]]
    endings = [i for i in inside if encoding.ids[i] in special]
    if endings and not text[encoding.offsets[endings[-1]][1] : span[1]].strip():
        inside = [i for i in inside if i <= endings[-1]]
    return slice(inside[0], inside[-1] + 1) if inside else slice(0)


def _fill_rows(parts: Sequence[_Tokens], size: int) -> Iterator[_Tokens]:
    row: list[_Tokens] = []
    for part in parts:
        if row and sum(len(one.ids) for one in row) + len(part.ids) > size:
            yield _make_row(row, part, size)
            row = []
        row.append(part)
    yield _make_row(row, row[0], size)


def _make_row(row: list[_Tokens], filler: _Tokens, size: int) -> _Tokens:
    """Whole conversations, and then as much of the filler as it takes, again and again."""
    learnt = np.concatenate([one.learnt for one in row])
    missing = size - len(learnt)
    ids = np.concatenate([*(one.ids for one in row), np.resize(filler.ids, missing)])
    return _Tokens(ids, np.pad(learnt, (0, missing)))


def write_chats(chats: Chats, folder: Path) -> TokenData:
    """Write `folder` as `model.training.data.write_tokens` does, with whole rows a shard, and shard-00000.mask …,
    held_out.mask beside them.
    """
    n_rows, row = chats.ids.shape
    n_train = n_rows - chats.n_held_out
    a_shard = max(1, SHARD_TOKENS // row)
    names = {
        f"shard-{i:05d}": slice(at, min(at + a_shard, n_train))
        for i, at in enumerate(range(0, n_train, a_shard))
    }
    files: dict[str, NDArray[np.unsignedinteger]] = {}
    for name, rows in {**names, "held_out": slice(n_train, n_rows)}.items():
        files[f"{name}.bin"] = chats.ids[rows]
        files[f"{name}.mask"] = np.packbits(chats.learnt[rows], axis=1)
    return write_shards(folder, files, {"dtype": chats.ids.dtype.name, "row": row})
