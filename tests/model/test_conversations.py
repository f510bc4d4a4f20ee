"""Chats to rows: what is learned, how rows are packed, and which lines are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors, trainers
from torch.nn import functional

from kvasir.model.template.chat_template import ChatTemplate
from kvasir.model.tokenizer import train_tokenizer
from kvasir.model.training.data import conversations
from kvasir.model.training.data.conversations import Rendering, pack, read_conversations
from kvasir.model.training.data.corpus import CorpusError
from kvasir.model.training.data.masking import IGNORED
from kvasir.model.training.data.tokens import TokenData, open_arrays
from kvasir.model.training.settings import TrainSettings
from kvasir.model.training.trainer import Trainer
from tests.kit.random_models import make_config, make_decoder

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
# As Qwen3's template: thoughts stay only after the last question, where empty ones are added.
QWEN = """\
{% set ns = namespace(asked=0) %}
{% for message in messages %}
{%- if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.asked %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
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


def write_jsonl(path: Path, chats: Sequence[Sequence[Mapping[str, Any]]]) -> Path:
    path.write_text(
        "".join(json.dumps({"messages": messages}) + "\n\n" for messages in chats), encoding="utf-8"
    )
    return path


def make_data(
    folder: Path,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    template: str = CHATML,
    held_out: float = 0.2,
) -> TokenData:
    path = write_jsonl(folder / "chats.jsonl", chats)
    read = read_conversations([path], ChatTemplate(template), seed=0)
    packed = pack(read, tokenizer, held_out=held_out, context=CONTEXT)
    return packed.write(folder / "data", tokenizer)


def rows_of(data: TokenData) -> Iterator[tuple[Any, Any]]:
    """Yield the tokens of each row, and whether they are learned."""
    assert data.learned is not None
    bits = np.unpackbits(data.learned, axis=1, count=CONTEXT + 1)
    return zip(data.tokens, bits, strict=True)


def learned_by_hand(messages: list[dict[str, str]], template: str) -> list[tuple[int, bool]]:
    """Return the tokens of a conversation, each with whether it is learned."""
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
    return [
        (token, said[start])
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
    ]


@pytest.mark.parametrize("template", [CHATML, LLAMA, PLAIN], ids=["chatml", "llama", "plain"])
def test_what_the_assistant_says_is_learned_with_its_end_and_nothing_else(
    tmp_path: Path, template: str
) -> None:
    """Every token of every row, against conversations laid one after another by hand."""
    chats = make_chats(40)
    data = make_data(tmp_path, chats, template)
    wanted = [learned_by_hand(messages, template)[: CONTEXT + 1] for messages in chats]
    seen = []
    for row, bits in rows_of(data):
        left = [(int(t), bool(b)) for t, b in zip(row, bits, strict=True)]
        while fitting := [chat for chat in wanted if chat == left[: len(chat)]]:
            seen.append(fitting[0])
            left = left[len(fitting[0]) :]
        assert not any(own for _, own in left)  # filled up
    assert sorted(seen) == sorted(chat for chat in wanted if any(own for _, own in chat))
    said = [token for chat in wanted for token, own in chat if own]
    assert tokenizer.token_to_id(ENDINGS[template]) in said or template == PLAIN


def test_the_loss_is_that_of_learned_tokens_one_by_one(tmp_path: Path) -> None:
    data = make_data(tmp_path, make_chats(20))
    decoder = make_decoder(
        make_config(vocab_size=tokenizer.get_vocab_size(), max_model_len=CONTEXT)
    )
    settings = TrainSettings(
        steps=1, context=CONTEXT, batch_size=3, accumulate=2, mixed_precision=False
    )
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


def test_whole_rows_open_as_they_were_written(tmp_path: Path) -> None:
    data = make_data(tmp_path, make_chats(60))
    opened = TokenData(**open_arrays(tmp_path / "data"))
    assert opened.learned is not None
    assert data.learned is not None
    assert np.array_equal(opened.learned, data.learned)
    n_train = opened.n_train // (CONTEXT + 1)
    inputs = {tuple(row) for row in data.tokens[:n_train, :-1].tolist()}
    for step in range(30):
        batch = opened.batch(seed=0, step=step, batch_size=4, context=CONTEXT)
        assert {tuple(row) for row in batch.inputs.tolist()} <= inputs
        assert ((batch.targets == IGNORED) | (batch.targets >= 0)).all()
        assert (batch.targets != IGNORED).any(axis=1).all()
    held_out = opened.held_out_rows(CONTEXT, 1000)
    assert len(held_out.inputs) == len(opened.held_out) // (CONTEXT + 1)


def test_the_prompt_of_a_sample_is_what_comes_before_an_answer(tmp_path: Path) -> None:
    data = make_data(tmp_path, make_chats(9))
    prompt = tokenizer.decode(
        data.held_out[: data.prompt_length].tolist(), skip_special_tokens=False
    )
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
    with pytest.raises(
        CorpusError, match=r"^of 2 conversations, 1 have an answer within 48 tokens"
    ):
        pack(read[1:3], tokenizer, held_out=0.0, context=CONTEXT)


def message(**fields: Any) -> str:
    return json.dumps({"messages": [fields]})


def weighted(role: str, weight: object) -> str:
    return message(role=role, content="x", weight=weight)


GOOD = json.dumps(
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ('{"text": "x"}', 'not a chat, {"messages": '),
        ("[]", "not a chat, "),
        ('{"messages": []}', "not a chat, "),
        ('{"messages": ["x"]}', "message 0 must be {"),
        (message(role=1, content="x"), "message 0 must be {"),
        (message(role="user"), "message 0's content must be text, not None"),
        (message(role="user", content=3), "message 0's content must be text, not 3"),
        (message(role="assistant", content="x"), "message 0 is the assistant's"),
        (weighted("assistant", 0.5), "message 0's weight must be 0 (not learned) or 1, not 0.5"),
        (weighted("assistant", False), "message 0's weight must be 0 (not learned) or 1, not F"),
        (weighted("assistant", "0"), "message 0's weight must be 0 (not learned) or 1, not '0'"),
        (weighted("user", 1), "message 0 has weight 1, but only the assistant's are learned"),
        (message(role="user", content="x", train=False), "message 0 has 'train', which the chat"),
        (message(role="assistant", content="x", thinking="y"), "message 0 has 'thinking', which"),
        (message(role="assistant", tool_calls=[{}]), "message 0 has 'tool_calls', which the chat"),
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
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "{% for m in messages %}{{ m.content }}{% if not loop.last %}-{% endif %}!{% endfor %}",
    ],
    ids=["the answer does not begin as it was asked for", "the answer changes what asked for it"],
)
def test_a_template_that_hides_what_the_assistant_says_is_refused(
    tmp_path: Path, template: str
) -> None:
    """Learning what is left after the shorter text would learn something else."""
    chat: list[dict[str, Any]] = [*json.loads(GOOD)["messages"], {"role": "user", "content": "c"}]
    path = write_jsonl(tmp_path / "chats.jsonl", [chat])
    with pytest.raises(
        CorpusError, match=r"chats\.jsonl:1: the chat template's text for message 1 does not begin"
    ):
        read_conversations([path], ChatTemplate(template), seed=0)


def test_files_that_cannot_be_read_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.jsonl cannot be read: "):
        read_conversations([tmp_path / "nowhere.jsonl"], ChatTemplate(CHATML), seed=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match=r"^no lines in "):
        read_conversations([tmp_path / "empty.jsonl"], ChatTemplate(CHATML), seed=0)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_an_answer_that_the_tokenizer_joins_with_what_asks_for_it_is_refused(
    trim_offsets: bool,
) -> None:
    """Learned as the token " blue", the answer would never follow the prompt "assistant: "."""
    gpt2 = Tokenizer.from_str(tokenizer.to_str())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    gpt2.train_from_iterator(["the sea is blue assistant:\n\n"] * 3, trainer)
    for prompt in ("assistant: ", "assistant:", "assistant:\n\n"):
        read = [[Rendering(f"the sea {prompt}blue\n", [(len(prompt) + 8, len(prompt) + 13)])]] * 2
        if prompt.endswith(" "):
            message = r"joins the beginning of an answer, 'blue\\n', .*, 'the sea assistant: ';"
            with pytest.raises(CorpusError, match=message):
                pack(read, gpt2, held_out=0.0, context=CONTEXT)
        else:
            packed = pack(read, gpt2, held_out=0.0, context=CONTEXT)
            assert gpt2.decode(packed.ids[0][packed.learned[0]].tolist()) == "blue\n"
    # Before a word, this tokenizer cuts line breaks differently than at the end; nothing is joined.
    assert gpt2.encode("\n\nblue").tokens[0] != gpt2.encode("\n\n").tokens[0]


# What is learned, as text


def learned_texts(data: TokenData) -> list[tuple[str, str]]:
    """Every stretch of learned tokens: the text of its row before it, and its own."""
    stretches = []
    for row, bits in rows_of(data):
        edges = np.flatnonzero(np.diff(bits, prepend=0, append=0))
        for start, end in edges.reshape(-1, 2):
            before, own = (
                tokenizer.decode(ids.tolist(), False) for ids in (row[:start], row[start:end])
            )
            stretches.append((before, own))
    return sorted(stretches)


def turn(role: str, content: str, **fields: object) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize("template", [CHATML, QWEN], ids=["chatml", "qwen"])
@pytest.mark.parametrize(
    ("weights", "learned"), [((0, 1), "b"), ((1, 0), "a"), ((None, 1), "ab"), ((0, 0), "")]
)
def test_an_answer_of_weight_0_is_read_and_not_learned(
    tmp_path: Path, template: str, weights: tuple[int | None, int | None], learned: str
) -> None:
    first, second = weights
    one = turn("user", "1", weight=0), turn("assistant", "a", weight=first)
    chat = [*one, turn("user", "2"), turn("assistant", "b", weight=second)]
    other = [turn("user", "3"), turn("assistant", "c")]
    said = [own for _, own in learned_texts(make_data(tmp_path, [chat, other, other], template))]
    thought = "<think>\n\n</think>\n\n" if template == QWEN else ""
    assert sorted(said) == [f"{thought}{answer}<|im_end|>" for answer in [*learned, "c", "c"]]


def test_where_a_template_rewrites_earlier_turns_each_answer_is_learned_as_it_is_asked_for(
    tmp_path: Path,
) -> None:
    """Qwen3's template removes thoughts from earlier turns."""
    chat = [
        turn("user", "1"),
        turn("assistant", "a", thinking="x"),
        turn("user", "2"),
        turn("assistant", "b"),
    ]
    stretches = learned_texts(make_data(tmp_path, [chat, chat], QWEN))
    asked = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    again = f"{asked}a<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    assert len(stretches) == 4
    for before, said in stretches:
        if said == "<think>\nx\n</think>\n\na<|im_end|>":
            assert before == asked
        else:
            assert said == "<think>\n\n</think>\n\nb<|im_end|>"
            assert before.endswith(again)


def test_no_answer_of_a_conversation_that_is_held_out_is_trained_on(tmp_path: Path) -> None:
    """Cut by answers, one would be in both parts, and the held-out loss would flatter."""
    chats = [
        [
            turn("user", "1"),
            turn("assistant", f"a{i}"),
            turn("user", "2"),
            turn("assistant", f"b{i}"),
        ]
        for i in range(6)
    ]
    data = make_data(tmp_path, chats, QWEN, held_out=0.1)
    names = [
        {
            token
            for token in tokenizer.decode(part.tolist()).replace("\n", " ").split()
            if token[0] in "ab"
        }
        for part in (data.tokens.reshape(-1)[: data.n_train], data.held_out)
    ]
    held_out = {name[1:] for name in names[1] if name[1:].isdigit()}
    trained = {name[1:] for name in names[0] if name[1:].isdigit()}
    assert len(held_out) == 1
    assert not held_out & trained


def test_an_assistant_that_speaks_first_is_read_where_it_is_not_to_be_learned(
    tmp_path: Path,
) -> None:
    chat = [turn("assistant", "hi", weight=0), turn("user", "1"), turn("assistant", "a")]
    assert {own for _, own in learned_texts(make_data(tmp_path, [chat, chat]))} == {"a<|im_end|>"}
