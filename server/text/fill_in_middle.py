"""Prompts for the text between a prefix and a suffix, of models that were trained to fill it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The tags around prefix and suffix; the middle follows the last.

    ends: further tokens that end the middle in models of this form.
    """

    before_prefix: str
    before_suffix: str
    before_middle: str
    ends: tuple[str, ...] = ()
    space: str = ""  # before the prefix, which the model was trained with

    @property
    def tags(self) -> tuple[str, str, str]:
        """The three tags, each a token of the tokenizer."""
        return self.before_prefix, self.before_suffix, self.before_middle

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt, in the order prefix, suffix, middle (Bavarian et al. 2022)."""
        head = f"{self.before_prefix}{self.space}{prefix}"
        return f"{head}{self.before_suffix}{suffix}{self.before_middle}"

    def ending_ids(self, added_ids: Mapping[str, int]) -> frozenset[int]:
        """Return the ids of tokens that end the middle, the tags among them."""
        return frozenset(added_ids[tag] for tag in (*self.tags, *self.ends) if tag in added_ids)


# In the order of the papers of StarCoder, CodeLlama, DeepSeek-Coder and Qwen2.5-Coder, and as their
# tokenizers write the tags.
FORMS = (
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),
    FillInMiddle(
        "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",), space=" "
    ),  # Roziere et al. 2023: the prefix begins with a space, the suffix does not
    FillInMiddle(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    FillInMiddle(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"),
    ),
)


def form_of(added_ids: Mapping[str, int]) -> FillInMiddle | None:
    """Return the form whose tags a tokenizer has as added tokens; None without any."""
    return next((form for form in FORMS if added_ids.keys() >= set(form.tags)), None)
