"""Lengths and words of a load test's requests, and the number of its users over time.

Imports no Locust.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_TEXT = """the path of a file is read line by line and each value that it holds
becomes part of what is returned to whoever asked for its name"""


def draw_length(random: Random, median: float, spread: float) -> int:
    """Draw a length of at least 1 from a log-normal distribution with sigma `spread`."""
    return max(1, round(median * random.lognormvariate(0, spread)))


def draw_words(random: Random, n: int) -> str:
    """Draw n words. The text ends in a space, so that more can follow."""
    return " ".join(random.choices(_TEXT.split(), k=n)) + " "


def step(share: float, most: int) -> int:
    """Return the users at a share of the time: a quarter more in each quarter of it."""
    return max(1, round(most * (int(share * 4) + 1) / 4))


def spike(share: float, most: int) -> int:
    """Return the users at a share of the time: a quarter, and all in the middle third."""
    return most if 1 / 3 <= share < 2 / 3 else max(1, most // 4)


PACES: dict[str, Callable[[float, int], int] | None] = {
    "constant": None,
    "step": step,
    "spike": spike,
    "poisson": None,
}
