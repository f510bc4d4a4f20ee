"""From tokens to text, a piece at a time: characters that are whole, and nothing that may be part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = 8  # prompt tokens shown to the decoder: some decoders treat the start of a text specially
_BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet


class Detokenizer:
    """The text of one sequence. A character whose bytes are still to come is held back until `flush`."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        context = list(prompt_ids[-_CONTEXT:])
        before: str = tokenizer.decode(context)
        if before.endswith(_BROKEN):  # a prompt cut inside a character gives no context
            context, before = [], ""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._ids = context
        self._n_before = len(before)
        self.n_chars = 0  # of text that has been given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        piece: str = self._stream.step(self._tokenizer, token_id) or ""
        self.n_chars += len(piece)
        return piece

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        piece: str = self._tokenizer.decode(self._ids)[self._n_before + self.n_chars :]
        self.n_chars += len(piece)
        return piece


class StopChecker:
    """Looks for the stop string that is complete first, and of several complete at once for the longest.

    Text that may be the beginning of one is held back; the stop string itself, and what follows, is never given out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is safe to show."""
        if self.stopped:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return buffer[: min(found)[1]]
        n_held = self._n_held(buffer)
        self._held = buffer[len(buffer) - n_held :]
        return buffer[: len(buffer) - n_held]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        text, self._held = self._held, ""
        return text

    def _n_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        for n in range(min(len(buffer), self._longest - 1), 0, -1):
            if any(stop.startswith(buffer[-n:]) for stop in self._stops):
                return n
        return 0


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token by itself, special tokens too; bytes that are no whole character show as U+FFFD."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text
