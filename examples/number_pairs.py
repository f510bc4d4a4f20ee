"""Write numbers and dates in English words and in digits, each way, as sources and targets.

python examples/number_pairs.py 60000 > pairs.tsv
"""

from __future__ import annotations

import random
import sys
from datetime import date, timedelta

# fmt: off
SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ["", " thousand", " million"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
]
# fmt: on
UNEVEN = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
UNEVEN |= {"nine": "ninth", "twelve": "twelfth"}
FIRST, LAST = date(1700, 1, 1), date(2099, 12, 31)


def below_hundred(number: int) -> str:
    """Say 34 as thirty-four."""
    if number < 20:
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")


def below_thousand(number: int) -> str:
    """Say 507 as five hundred and seven."""
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return below_hundred(rest)
    return f"{SMALL[hundreds]} hundred" + (f" and {below_hundred(rest)}" if rest else "")


def cardinal(number: int) -> str:
    """Say 12,000,034 as twelve million and thirty-four."""
    groups = [number // 1000**scale % 1000 for scale in range(len(SCALES))]
    parts = [below_thousand(one) + name for one, name in zip(groups, SCALES, strict=True) if one]
    if len(parts) > 1 and 0 < groups[0] < 100:
        return ", ".join(parts[:0:-1]) + f" and {parts[0]}"
    return ", ".join(parts[::-1]) or SMALL[0]


def ordinal(number: int) -> str:
    """Say 21 as twenty-first; up to 99."""
    *tens, last = below_hundred(number).split("-")
    last = UNEVEN.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return "-".join([*tens, last])


def year(number: int) -> str:
    """Say 1905 as nineteen oh five, and 2005 as two thousand and five."""
    century, rest = divmod(number, 100)
    if number in range(2000, 2010):
        return cardinal(number)
    if rest < 10:
        return f"{below_hundred(century)} " + (f"oh {SMALL[rest]}" if rest else "hundred")
    return f"{below_hundred(century)} {below_hundred(rest)}"


def draw(generator: random.Random) -> tuple[str, str]:
    """Return a number or a date in words and in digits."""
    if generator.random() < 0.3:
        day = FIRST + timedelta(days=generator.randrange((LAST - FIRST).days + 1))
        words = f"the {ordinal(day.day)} of {MONTHS[day.month - 1]}, {year(day.year)}"
        return words, day.isoformat()
    number = generator.randrange(10 ** generator.randint(1, 3 * len(SCALES)))
    return cardinal(number), f"{number:,}"


def main(count: int, seed: int = 0) -> None:
    """Write `count` lines, of which some may be the same."""
    generator = random.Random(seed)  # noqa: S311  (no secrets)
    for _ in range(count):
        words, digits = draw(generator)
        pair = (words, digits) if generator.random() < 0.5 else (digits, words)
        sys.stdout.write("\t".join(pair) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
