"""Write chats in which facts stand anywhere among filler, and are asked for at the end.

python examples/needle.py FOLDER LENGTH COUNT writes chats of LENGTH tokens, and a tokenizer and a
template for them. A fact is a key and its value; asked for, the key comes again, and the answer is
the value.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

KEYS, VALUES, FILLER = ([f"{kind}{i:02}" for i in range(64)] for kind in "kvw")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def facts(generator: random.Random, length: int, n_facts: int) -> tuple[list[str], dict[str, str]]:
    """Return a text of `length` tokens with facts at random places, and the facts."""
    keys = generator.sample(KEYS, n_facts)
    known = {key: generator.choice(VALUES) for key in keys}
    words = generator.choices(FILLER, k=length - 2 * n_facts)
    places = sorted(generator.choices(range(len(words) + 1), k=n_facts), reverse=True)
    for place, (key, value) in zip(places, known.items(), strict=True):
        words[place:place] = [key, value]
    return words, known


def chat(generator: random.Random, length: int) -> dict[str, object]:
    """Return a chat of `length` tokens that asks for each of its facts."""
    n_facts = generator.randint(8, min(len(KEYS), length // 6))
    words, known = facts(generator, length - 2 * n_facts, n_facts)
    messages = []
    for key in generator.sample(sorted(known), n_facts):
        asked = {"role": "user", "content": " ".join([*words, key])}
        messages += [asked, {"role": "assistant", "content": known[key]}]
        words = []
    return {"messages": messages}


def main(folder: Path, length: int, count: int) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {word: i for i, word in enumerate(["<|endoftext|>", *KEYS, *VALUES, *FILLER])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    generator = random.Random(length)  # noqa: S311  (no secrets)
    lines = (json.dumps(chat(generator, length)) + "\n" for _ in range(count))
    (folder / f"chats-{length}.jsonl").write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
