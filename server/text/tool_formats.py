"""The formats in which models write function calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

# DeepSeek's tags have a bar and spaces of their own.
BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK_TAGS = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
KIMI_TAGS = [
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end")
]
KIMI_TAGS.append("<|tool_calls_section_end|>")


@dataclass(frozen=True, slots=True)
class Named:
    """Arguments in JSON after a name: the head up to their brace, and special tokens in it."""

    head: re.Pattern[str]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments in tags: the function's head, an argument, and the end of the function.

    A head begins with `literal`, and goes on with `rest` while it is incomplete; an argument begins
    with `begin` and ends with `last`. The groups of an argument are its key and its value.
    """

    literal: str
    rest: re.Pattern[str]
    head: re.Pattern[str]
    begin: str
    argument: re.Pattern[str]
    last: str = "</parameter>"
    end: str = ""

    def may_begin(self, text: str) -> bool:
        """Return whether more text could make a head of this one."""
        n = len(self.literal)
        return self.literal.startswith(text[:n]) and self.rest.fullmatch(text[n:]) is not None


@dataclass(frozen=True, slots=True)
class Bare:
    """A name, and an object whose keys are bare and whose strings are between quotes of its own."""

    head: re.Pattern[str]
    quote: str


class Python:
    """A list of calls in Python, of which the opening is the first bracket."""

    head = re.compile(r"\s*(?:[A-Za-z_][\w.]*\s*(?:\(|\Z)|\Z)")


_FUNCTION = Tagged(
    "<function=",
    re.compile(r"[^>]*"),
    re.compile(r"<function=([^>\s]+)>"),
    "<parameter=",
    re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    end="</function>",
)
_INVOKE = Tagged(
    '<invoke name="',
    re.compile(r"[^>]*"),
    re.compile(r'<invoke name="([^">]+)">'),
    '<parameter name="',
    re.compile(r'<parameter name="([^">]+)">(.*?)</parameter>', re.DOTALL),
    end="</invoke>",
)
_KEYS_AND_VALUES = Tagged(
    "",
    re.compile(r"[^\s<{]*\s*(?:<[^>]*)?"),
    re.compile(r"([^\s<{]+)\s*(?=<arg_key>|</tool_call>)"),
    "<arg_key>",
    re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    "</arg_value>",
)
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END = map(re.escape, KIMI_TAGS[1:4])


class ToolCallFormat(Enum):
    """The formats in which models write calls: the text before a call, and the parts after it.

    HERMES: `<tool_call>{"name": …, "arguments": …}</tool_call>`, one after the other, after any
    text. LLAMA: `{"name": …, "parameters": …}; …`, from the start of the text or after
    `<|python_tag|>`. MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`. GRANITE, NEMOTRON,
    HUNYUAN: such a list after a tag. MISTRAL_ARGS: `[TOOL_CALLS]name[ARGS]{…}`. DEEPSEEK,
    DEEPSEEK_V31, KIMI: a block of calls, each with a name, a separator and JSON, the first in a
    fence of Markdown. QWEN_CODER, SEED: `<function=name><parameter=key>value</parameter>…
    </function>` in a tag. MINIMAX: a block of `<invoke name="…"><parameter name="key">value
    </parameter>…</invoke>`. GLM: `<tool_call>name<arg_key>key</arg_key><arg_value>value
    </arg_value>…</tool_call>`. PYTHONIC: `[name(key=value, …), …]`, from the start of the text.
    LFM: such a list in a tag. GEMMA: `<|tool_call>call:name{key:<|"|>text<|"|>, …}<tool_call|>`.

    following: the beginning of a further call without `opening`. inside: the form of a call, where
    it is not one object in JSON. tags: the parts of a format that may be special tokens. ends: the
    parts that end a block of calls. forced: the format of calls that a grammar enforces.
    """

    HERMES = ("<tool_call>", ("</tool_call>",), "")
    LLAMA = ("<|python_tag|>", (";",), "{")
    MISTRAL = ("[TOOL_CALLS]", (",", "]"), "{")
    MISTRAL_ARGS = (
        *("[TOOL_CALLS]", (), ""),
        Named(
            re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)"),
            ("[ARGS]", "[CALL_ID]"),
        ),
    )
    GRANITE = ("<|tool_call|>", (",", "]", "<|/tool_call|>"), "{")
    NEMOTRON = ("<TOOLCALL>", (",", "]", "</TOOLCALL>"), "{")
    HUNYUAN = ("<tool_calls>", (",", "]", "</tool_calls>"), "{")
    DEEPSEEK = (
        *(BEGIN, ("```", CALL_END, END), CALL),
        Named(re.compile(rf"(?:{CALL})?\s*function{SEP}([^\s{{}}<]+)\s*```json\s*(?=\{{)"), (SEP,)),
    )
    DEEPSEEK_V31 = (
        *(BEGIN, (CALL_END, END), CALL),
        Named(re.compile(rf"(?:{CALL})?\s*([^\s{{}}<]+)\s*{SEP}\s*(?=\{{)"), (SEP,)),
    )
    KIMI = (
        *(KIMI_TAGS[0], (KIMI_TAGS[3], KIMI_TAGS[4]), KIMI_TAGS[1]),
        Named(
            re.compile(
                rf"(?:{_KIMI_CALL})?\s*(?:functions\.)?([^\s{{}}<:]+)(?::\d*)?\s*"
                rf"{_KIMI_ARGUMENTS}\s*(?=\{{)"
            ),
            (KIMI_TAGS[2],),
        ),
    )
    QWEN_CODER = ("<tool_call>", ("</tool_call>",), "", _FUNCTION)
    SEED = ("<seed:tool_call>", ("</seed:tool_call>",), "", _FUNCTION)
    MINIMAX = ("<minimax:tool_call>", ("</minimax:tool_call>",), "<invoke", _INVOKE)
    GLM = ("<tool_call>", ("</tool_call>",), "", _KEYS_AND_VALUES)
    PYTHONIC = ("[", ("]",), "", Python())
    LFM = ("<|tool_call_start|>[", ("<|tool_call_end|>",), "", Python())
    GEMMA = (
        *("<|tool_call>", ("<tool_call|>",), ""),
        Bare(re.compile(r"call:([^\s{}<]+)\s*(?=\{)"), '<|"|>'),
    )

    def __init__(
        self,
        opening: str,
        closings: tuple[str, ...],
        following: str,
        inside: Named | Tagged | Bare | Python | None = None,
    ) -> None:
        self.opening = opening
        self.closings = closings
        self.following = following
        self.inside = inside
        tags = {opening.removesuffix("["), *closings, following}
        tags |= {*inside.tags} if isinstance(inside, Named) else set()
        tags |= {inside.quote} if isinstance(inside, Bare) else set()
        self.tags = frozenset(tag for tag in tags if len(tag) > 3)
        self.ends = {"]", *closings[-1:]} - {";"}

    @property
    def forced(self) -> ToolCallFormat:
        """The format of calls that must come: one that grammars have."""
        if isinstance(self.inside, Tagged):
            return ToolCallFormat.HERMES
        return ToolCallFormat.LLAMA if isinstance(self.inside, Bare | Python) else self
