"""Write texts to train on, in which codes are told and asked for again; or find such needles.

python examples/needle.py write 16000 needles
python examples/needle.py find DIRECTORY picture.png
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import kvasir

# fmt: off
ADJECTIVES = [
    "old", "small", "bright", "quiet", "heavy", "green", "early", "lost", "narrow", "warm", "empty",
    "plain", "round", "distant", "silver", "gentle",
]
NOUNS = [
    "river", "garden", "house", "letter", "mountain", "window", "harbour", "teacher", "bird",
    "road", "market", "clock", "bridge", "forest", "engine", "ship",
]
VERBS = [
    "follows", "crosses", "finds", "keeps", "leaves", "paints", "hears", "opens", "carries",
    "watches", "needs", "turns", "reaches", "holds", "meets", "answers",
]
# fmt: on
CONSONANTS, VOWELS = "bdklmnrst", "aeiou"
SENTENCES = 160  # of a document, some 2,000 tokens
LENGTHS, DEPTHS, TRIALS = (256, 512, 768, 1024, 1280, 1536, 1792, 2032), 9, 8


def filler(generator: random.Random) -> str:
    """Return a sentence that says nothing of codes."""
    (first, second), verb = generator.choices(NOUNS, k=2), generator.choice(VERBS)
    one, other = generator.choices(ADJECTIVES, k=2)
    return f"The {one} {first} {verb} the {other} {second}."


def draw_needle(generator: random.Random) -> tuple[str, str]:
    """Return a name and its code, four digits."""
    syllables = (generator.choice(CONSONANTS) + generator.choice(VOWELS) for _ in range(3))
    return "".join(syllables).capitalize(), " ".join(generator.choices("0123456789", k=4))


def fact(name: str, code: str) -> str:
    """Tell a code."""
    return f"The code of {name} is {code} ."


def question(name: str) -> str:
    """Ask for a code."""
    return f"Again, the code of {name} is"


def document(generator: random.Random) -> str:
    """Return sentences: codes, questions of codes with their answers, and a share of fillers."""
    share, told, sentences = generator.uniform(0, 0.97), [draw_needle(generator)], []
    sentences.append(fact(*told[-1]))
    while len(sentences) < SENTENCES:
        if generator.random() < share:
            sentences.append(filler(generator))
        elif generator.random() < 0.4:
            told.append(draw_needle(generator))
            sentences.append(fact(*told[-1]))
        else:  # half of them of a code near by
            power = generator.choice((1, 3))
            name, code = told[-1 - int(len(told) * generator.random() ** power)]
            sentences.append(f"{question(name)} {code} .")
    return " ".join(sentences)


def write(count: str, folder: str) -> None:
    """Write documents, a file each."""
    generator, out = random.Random(0), Path(folder)  # noqa: S311  (no secrets)
    out.mkdir(parents=True)
    for i in range(int(count)):
        (out / f"{i:05}.txt").write_text(document(generator), encoding="utf-8")


def haystack(model: kvasir.Model, generator: random.Random, length: int, depth: float) -> str:
    """Return fillers of `length` tokens in all, with place for a code at a share of them."""
    n_tokens, sentences = 0, []
    while n_tokens < length - 40:
        sentences.append(filler(generator))
        n_tokens += len(model.model_dir.tokenizer.encode(f" {sentences[-1]}").ids)
    place = round(depth * len(sentences))
    return " ".join([*sentences[:place], "{}", *sentences[place:]])


def find(directory: str, picture: str) -> None:
    """Ask for a code at each depth of texts of each length; draw the share of right answers."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  only training installs it

    generator, shares = random.Random(1), []  # noqa: S311
    with kvasir.load(directory) as model:
        for depth in range(DEPTHS):
            shares.append([])
            for length in LENGTHS:
                n_right = 0
                for _ in range(TRIALS):
                    name, code = draw_needle(generator)
                    text = haystack(model, generator, length, depth / (DEPTHS - 1))
                    prompt = f"{text.format(fact(name, code))} {question(name)}"
                    answer = model.generate(prompt, temperature=0, max_tokens=8)
                    n_right += answer.split()[:4] == code.split()
                shares[-1].append(n_right / TRIALS)
            print(f"{depth / (DEPTHS - 1):4.0%}", *(f"{share:5.0%}" for share in shares[-1]))  # noqa: T201
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(LENGTHS)), map(str, LENGTHS))
    axes.set_yticks(range(DEPTHS), [f"{i / (DEPTHS - 1):.0%}" for i in range(DEPTHS)])
    axes.set(xlabel="tokens of the text", ylabel="depth of the code", title="Codes found")
    figure.colorbar(image, format=lambda share, _: f"{share:.0%}")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    {"write": write, "find": find}[sys.argv[1]](*sys.argv[2:])
