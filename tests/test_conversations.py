"""Chats to rows: what is learnt, against a slow walk over characters; what is packed; and lines that are no chats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.nn import functional

from model import conversations
from model.chat import ChatTemplate
from model.conversations import are_chats, pack, read_conversations, write_chats
from model.data import IGNORED, CorpusError, TokenData, open_tokens
from model.tokenizer import train_tokenizer
from model.trainer import Trainer, TrainSettings
from tests.random_models import make_config, make_decoder

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """\
{% for message in messages %}
{% if message.role == 'user' %}{{ '<s>[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' </s>' }}{% endif %}
{% endfor %}
"""
PLAIN = """\
{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
ENDINGS = {CHATML: "<|im_end|>", LLAMA: "</s>", PLAIN: "\n"}
WORDS = ["the", "sea", "is", "blue", "and", "the", "fish", "is", "red,", "naïve", "魚", "<b>", "🙂"]

tokenizer = train_tokenizer([" ".join(WORDS) + " user assistant system\n"] * 3, 330)
tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
CONTEXT = 48


def make_chats(n: int, n_turns: int = 3, seed: int = 0) -> list[list[dict[str, str]]]:
    draw = random.Random(seed)
    return [
        [
            {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))}
            for _ in range(draw.randint(1, n_turns))
            for role in ("user", "assistant")
        ]
        for _ in range(n)
    ]


def write_jsonl(path: Path, chats: list[list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n\n" for messages in chats), encoding="utf-8")
    return path


def make_data(
    folder: Path, chats: list[list[dict[str, str]]], template: str = CHATML, held_out: float = 0.2
) -> TokenData:
    path = write_jsonl(folder / "chats.jsonl", chats)
    read = read_conversations([path], ChatTemplate(template), seed=0)
    return write_chats(pack(read, tokenizer, held_out=held_out, context=CONTEXT), folder / "data")


def learnt_by_hand(messages: list[dict[str, str]], template: str) -> list[tuple[int, bool]]:
    """Tokens of a conversation, each with whether the assistant says it: character by character, by hand."""
    text, said = "", []
    for message in messages:
        before, after = {
            CHATML: (f"<|im_start|>{message['role']}\n", "<|im_end|>\n"),
            LLAMA: ("<s>[INST] ", " [/INST]") if message["role"] == "user" else ("", " </s>"),
            PLAIN: (f"{message['role']}:", "\n"),
        }[template]
        content = (
            message["content"]
            if template == CHATML or (template, message["role"]) == (LLAMA, "user")
            else " " + message["content"]
        )
        for part, own in ((before, False), (content, True), (after, True)):
            text += part
            said += [own and message["role"] == "assistant"] * len(part)
        if template == CHATML:
            said[-1] = False  # the line break after the end of a turn
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [(token, said[start]) for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]


@pytest.mark.parametrize("template", [CHATML, LLAMA, PLAIN], ids=["chatml", "llama", "plain"])
def test_what_the_assistant_says_is_learnt_with_its_end_and_nothing_else(tmp_path: Path, template: str) -> None:
    """Every token of every row, against conversations laid one after another by hand."""
    chats = make_chats(40)
    data = make_data(tmp_path, chats, template)
    wanted = [learnt_by_hand(messages, template)[: CONTEXT + 1] for messages in chats]
    seen = []
    for tokens, masks in ((data.shards[0], data.masks[0]), (data.held_out, data.held_out_mask)):
        assert masks is not None
        for row, bits in zip(tokens.reshape(-1, CONTEXT + 1), masks, strict=True):
            left = [(int(t), bool(b)) for t, b in zip(row, np.unpackbits(bits, count=CONTEXT + 1), strict=True)]
            while found := [one for one in wanted if one == left[: len(one)]]:
                seen.append(found[0])
                left = left[len(found[0]) :]
            assert not any(own for _, own in left)  # filled up
    assert sorted(seen) == sorted(one for one in wanted if any(own for _, own in one))
    said = [token for one in wanted for token, own in one if own]
    assert tokenizer.token_to_id(ENDINGS[template]) in said or template == PLAIN


def test_the_loss_is_that_of_learnt_tokens_one_by_one(tmp_path: Path) -> None:
    data = make_data(tmp_path, make_chats(20))
    decoder = make_decoder(make_config(vocab_size=tokenizer.get_vocab_size(), max_model_len=CONTEXT))
    settings = TrainSettings(steps=1, context=CONTEXT, batch_size=3, accumulate=2, mixed_precision=False)
    losses = []
    for draw in range(2):
        batch = data.batch(seed=0, step=draw, batch_size=3, context=CONTEXT)
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            for i in range(CONTEXT):
                if targets[i] != IGNORED:
                    logits = decoder(torch.from_numpy(inputs[None, : i + 1]))[0, -1]
                    losses.append(functional.cross_entropy(logits, torch.tensor(targets[i])).item())
    assert 0 < len(losses) < 6 * CONTEXT
    loss, _ = Trainer(decoder, tokenizer, data, settings)._update(rate=0.0)
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_shards_of_whole_rows_open_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "SHARD_TOKENS", 2 * (CONTEXT + 1) + 5)
    data = make_data(tmp_path, make_chats(60))
    assert len(data.shards) > 2
    assert {len(shard) for shard in data.shards[:-1]} == {2 * (CONTEXT + 1)}
    opened = open_tokens(tmp_path / "data")
    assert [mask.tolist() for mask in opened.masks] == [mask.tolist() for mask in data.masks]
    starts = {tuple(row) for shard in data.shards for row in shard.reshape(-1, CONTEXT + 1)[:, :-1].tolist()}
    for step in range(30):
        batch = opened.batch(seed=0, step=step, batch_size=4, context=CONTEXT)
        assert {tuple(row) for row in batch.inputs.tolist()} <= starts
        assert ((batch.targets == IGNORED) | (batch.targets >= 0)).all()
        assert (batch.targets != IGNORED).any(axis=1).all()
    held_out = opened.held_out_rows(CONTEXT, 1000)
    assert len(held_out.inputs) == len(opened.held_out) // (CONTEXT + 1)


def test_the_prompt_of_a_sample_is_what_comes_before_an_answer(tmp_path: Path) -> None:
    data = make_data(tmp_path, make_chats(9))
    prompt = tokenizer.decode(data.held_out[: data.prompt_length].tolist(), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>user\n")
    assert prompt.endswith("<|im_start|>assistant\n")


def test_long_and_answerless_conversations_are_counted() -> None:
    user, answer = {"role": "user", "content": "sea"}, {"role": "assistant", "content": "blue"}
    long_answer = {"role": "assistant", "content": "the sea " * CONTEXT}
    long_question = {"role": "user", "content": "the sea " * CONTEXT}
    chats = [[user, answer], [user, answer], [user], [user, long_answer], [long_question, answer]]
    read = [conversations._render(ChatTemplate(CHATML), chat, None) for chat in chats]
    packed = pack(read, tokenizer, held_out=0.0, context=CONTEXT)
    assert (packed.n_cut, packed.n_without_answer) == (1, 2)
    assert packed.ending_ids == {tokenizer.token_to_id("<|im_end|>")}
    with pytest.raises(CorpusError, match=r"^of 2 conversations, 1 have an answer within 48 tokens"):
        pack(read[1:3], tokenizer, held_out=0.0, context=CONTEXT)


GOOD = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ('{"text": "x"}', 'not a chat, {"messages": '),
        ("[]", "not a chat, "),
        ('{"messages": []}', "not a chat, "),
        ('{"messages": ["x"]}', "message 0 must be {"),
        ('{"messages": [{"role": 1, "content": "x"}]}', "message 0 must be {"),
        ('{"messages": [{"role": "user"}]}', "message 0's content must be text, not None"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 0's content must be text, not 3"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the chat template cannot render this: "),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(CorpusError) as caught:
        read_conversations([path], ChatTemplate(CHATML), seed=0)
    assert str(caught.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}-{% endif %}!{% endfor %}",
    ],
    ids=["the answer does not begin as it was asked for", "later messages change it"],
)
def test_a_template_that_hides_what_the_assistant_says_is_refused(tmp_path: Path, template: str) -> None:
    """Learning what is left after the shorter text would learn something else."""
    chat: list[dict[str, Any]] = [*json.loads(GOOD)["messages"], {"role": "user", "content": "c"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [chat])
    with pytest.raises(CorpusError, match=r"chats\.jsonl:1: what the chat template makes of message 1 does not begin"):
        read_conversations([path], ChatTemplate(template), seed=0)


def test_files_that_cannot_be_read_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.jsonl cannot be read: "):
        read_conversations([tmp_path / "nowhere.jsonl"], ChatTemplate(CHATML), seed=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match=r"^no chats in "):
        read_conversations([tmp_path / "empty.jsonl"], ChatTemplate(CHATML), seed=0)


def test_chats_are_jsonl_files_named_outright(tmp_path: Path) -> None:
    """Folders are text, whatever lies in them."""
    (tmp_path / "folder.jsonl").mkdir()
    assert are_chats([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert not are_chats([tmp_path / "a.txt", tmp_path / "folder.jsonl"])
    with pytest.raises(CorpusError, match="cannot be mixed with text"):
        are_chats([tmp_path / "a.jsonl", tmp_path / "b.txt"])


def test_a_token_that_the_question_and_the_answer_share_is_not_learnt() -> None:
    """Most of it may be the question's."""
    words = Tokenizer(models.WordLevel({"ab": 0, "c": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    read = [conversations.Conversation("c ab c", [(3, 6)])] * 2
    packed = pack(read, words, held_out=0.5, context=2)
    assert packed.ids.tolist() == [[1, 0, 1]] * 2
    assert packed.learnt.tolist() == [[False, False, True]] * 2
