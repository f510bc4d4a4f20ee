"""What a load test asks for, and how many users ask. Knows nothing of Locust."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

WORDS = (
    *(
        "the",
        "path",
        "of",
        "a",
        "file",
        "is",
        "read",
        "line",
        "by",
        "line",
        "and",
        "each",
        "value",
        "that",
        "it",
    ),
    *(
        "holds",
        "becomes",
        "part",
        "of",
        "what",
        "is",
        "returned",
        "to",
        "whoever",
        "asked",
        "for",
        "its",
        "name",
    ),
)


def draw(random: Random, median: float, spread: float) -> int:
    """A length, log-normal with sigma `spread`; at least 1."""
    return max(1, round(median * random.lognormvariate(0, spread)))


def words(random: Random, n: int) -> str:
    return " ".join(random.choices(WORDS, k=n)) + " "


def step(share: float, most: int) -> int:
    """Users after a share of the time: a quarter more of them each quarter of it."""
    return max(1, round(most * (int(share * 4) + 1) / 4))


def spike(share: float, most: int) -> int:
    """A quarter of the users, and all of them in the middle third."""
    return most if 1 / 3 <= share < 2 / 3 else max(1, most // 4)


PACES: dict[str, Callable[[float, int], int] | None] = {
    "constant": None,
    "step": step,
    "spike": spike,
    "poisson": None,
}
