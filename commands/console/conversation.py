"""A conversation on a terminal: what was said, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvasir.commands.console.chat_client import ChatClient, Delta, NoTemplateError
from kvasir.model.platform.files import in_words
from kvasir.model.platform.suggestions import nearest

_NEW_TOKENS = 128  # of a continued text, whose length servers else limit to a few
_ALIASES = {"/bye": "/quit", "/exit": "/quit"}


class _Answered(NamedTuple):
    """The line that was answered last, and what was said before it."""

    line: str
    messages: list[dict[str, str]]
    text: str


@dataclass
class Conversation:
    """A conversation so far. `notify` shows a line to the user. fields: of every request.

    A model without a chat template continues a text instead; an encoder-decoder without one answers
    each line by itself. is_interactive: the user may enter an empty line.
    """

    client: ChatClient
    notify: Callable[[str], object]
    fields: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    is_interactive: bool = True
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    has_template: bool = True
    is_over: bool = False
    _last: _Answered | None = None
    _is_again: bool = False  # the next answer takes the last one's place

    def answer(self, line: str) -> Generator[Delta]:
        """Yield the answer to a line, which becomes part of the conversation once it began.

        What has come stays when the caller stops early. Raises ChatError, and forgets the line.
        """
        asked = _Answered(line, self.messages, self.text)
        if self._is_again and self._last:
            asked = self._last
        self._is_again = False
        if self.has_template:
            try:
                yield from self._chat(asked)
            except NoTemplateError:
                self.has_template = False
                hint = "; an empty line lets it go on" if self.is_interactive else ""
                does = f"continues your text{hint}"
                if self.client.has_sources:
                    does = "answers each line by itself"
                self.notify(f"note: this model has no chat template, so it {does}")
        if not self.has_template:
            yield from self._continue(asked)

    def _chat(self, asked: _Answered) -> Generator[Delta]:
        if asked.line:
            before = self._instructions() + asked.messages
            messages = [*before, {"role": "user", "content": asked.line}]
            yield from self._kept(asked, self.client.chat(messages, **self.fields))

    def _continue(self, asked: _Answered) -> Generator[Delta]:
        text = asked.line or ("" if self.client.has_sources else asked.text)
        if text:
            length = self.client.max_model_len or 2 * _NEW_TOKENS
            fields = {"max_tokens": min(_NEW_TOKENS, max(1, length // 2))} | self.fields
            yield from self._kept(asked, self.client.continued(text, **fields))

    def _kept(self, asked: _Answered, answer: Generator[Delta]) -> Generator[Delta]:
        """Yield an answer, which becomes part of the conversation as it comes."""
        content = ""
        for delta in answer:
            if not delta.is_reasoning:
                content += delta.text
                question = {"role": "user", "content": asked.line}
                said = {"role": "assistant", "content": content}
                self.messages = [*asked.messages, question, said]
                self.text = (asked.line or asked.text) + content
                self._last = asked
            yield delta

    def _instructions(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def command(self, line: str) -> str | None:
        """Obey a line that begins with a slash; return what is to be answered now, if anything."""
        name, _, argument = line.partition(" ")
        name = _ALIASES.get(name, name)
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            hint = f"did you mean {near}" if near else "/help lists them"
            self.notify(f"no such command: {name}; {hint}")
            return None
        return COMMANDS[name][1](self, argument.strip())

    def _help(self, _: str) -> None:
        for name, (about, _do) in COMMANDS.items():
            self.notify(f"{name:9}{about}")
        self.notify("Ctrl-C stops an answer, Ctrl-D ends the chat; a line may end in \\ to go on.")

    def _new(self, _: str) -> None:
        self.messages, self.text, self._last = [], "", None
        self.notify("a new conversation")

    def _again(self, _: str) -> str | None:
        if self._last is None:
            self.notify("nothing was answered yet")
            return None
        self._is_again = True
        return self._last.line

    def _instruct(self, text: str) -> None:
        self.system = text or None
        self.notify("the system message is set" if text else "there is no system message now")

    def _set(self, change: str) -> None:
        name, equals, value = change.partition("=")
        if equals and not value:
            self.fields.pop(name, None)
        elif equals:
            try:
                self.fields[name] = json.loads(value)
            except ValueError:
                self.fields[name] = value
        self.notify(f"fields of each request: {json.dumps(self.fields)}")

    def _save(self, name: str) -> None:
        if not name:
            self.notify("/save takes the name of a file")
            return
        said: dict[str, Any] = {"text": self.text}
        if self.has_template or self.client.has_sources:
            said = {"messages": self._instructions() + self.messages}
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write(json.dumps(said, ensure_ascii=False) + "\n")
        except OSError as error:
            self.notify(f"not saved: {in_words(error)}")
        else:
            self.notify(f"appended to {name}")

    def _quit(self, _: str) -> None:
        self.is_over = True


COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], str | None]]] = {
    "/help": ("this list", Conversation._help),
    "/new": ("forget the conversation", Conversation._new),
    "/again": ("answer the last line anew", Conversation._again),
    "/system": ("TEXT: the message before the conversation", Conversation._instruct),
    "/set": ("NAME=VALUE: a field of each request, such as temperature=0", Conversation._set),
    "/save": ("FILE: append the conversation, as a line of JSON", Conversation._save),
    "/quit": ("end the chat, as /bye and /exit do", Conversation._quit),
}
