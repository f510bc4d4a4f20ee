"""The formats in which models write function calls."""

from __future__ import annotations

from enum import Enum

# DeepSeek's tags have a bar and spaces of their own.
BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK_TAGS = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]


class ToolCallFormat(Enum):
    """The formats in which models write calls: the text before a call, and the parts after it.

    HERMES: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one after the other, after any
    text. LLAMA: `{"name": …, "parameters": …}; …`, from the start of the text or after
    `<|python_tag|>`. MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`. GRANITE: such a list
    after `<|tool_call|>`. MISTRAL_ARGS: `[TOOL_CALLS]name[ARGS]{…}`. DEEPSEEK, DEEPSEEK_V31: a
    block of calls, each with a name, a separator and JSON, the first in a fence of Markdown.
    QWEN_CODER: `<tool_call><function=name><parameter=key>value</parameter>…</function>` and
    `</tool_call>`. PYTHONIC: `[name(key=value, …), …]`, from the start of the text.

    following: the beginning of a further call without `opening`. tags: the parts of a format that
    may be special tokens. forced: the format of calls that a grammar enforces.
    """

    HERMES = ("<tool_call>", ("</tool_call>",), "")
    LLAMA = ("<|python_tag|>", (";",), "{")
    MISTRAL = ("[TOOL_CALLS]", (",", "]"), "{")
    MISTRAL_ARGS = ("[TOOL_CALLS]", (), "")
    GRANITE = ("<|tool_call|>", (",", "]", "<|/tool_call|>"), "{")
    DEEPSEEK = (BEGIN, ("```", CALL_END, END), CALL)
    DEEPSEEK_V31 = (BEGIN, (CALL_END, END), f"{CALL} ")
    QWEN_CODER = ("<tool_call>", ("</tool_call>",), " ")
    PYTHONIC = ("[", ("]",), "")

    def __init__(self, opening: str, closings: tuple[str, ...], following: str) -> None:
        self.opening = opening
        self.closings = closings
        self.following = following.strip()
        tags = {opening, *closings, self.following, *([SEP] if opening == BEGIN else [])}
        if opening == "[TOOL_CALLS]":
            tags |= {"[ARGS]", "[CALL_ID]"}
        self.tags = frozenset(tag for tag in tags if len(tag) > 3)

    @property
    def forced(self) -> ToolCallFormat:
        """The format of calls that must come: one that grammars have."""
        return _FORCED.get(self, self)


_FORCED = {
    ToolCallFormat.QWEN_CODER: ToolCallFormat.HERMES,
    ToolCallFormat.PYTHONIC: ToolCallFormat.LLAMA,
}
