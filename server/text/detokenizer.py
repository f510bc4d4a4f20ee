"""From tokens to text, a piece at a time: characters that are whole, and nothing that may be part of a stop string."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = (
    8  # prompt tokens shown to the decoder: some decoders treat the start of a text specially
)
_BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet
# The byte-level alphabet of GPT-2 (Radford et al. 2019): printable bytes are themselves, the others follow from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Detokenizer:
    """The text of one sequence. A character whose bytes are still to come is held back until `flush`.

    Special tokens have no text, except those in `kept`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), kept: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self.n_chars = 0  # of text that has been given out
        self._begin(list(prompt_ids[-_CONTEXT:]))

    def _begin(self, context: list[int]) -> None:
        before: str = self._tokenizer.decode(context)
        if before.endswith(_BROKEN):  # a prompt cut inside a character gives no context
            context, before = [], ""
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._ids = context
        self._n_decoded = len(
            before
        )  # characters of what the ids decode to that are not ours, or have been given out

    def push(self, token_id: int) -> str:
        if token_id in self._kept:
            return self._keep(token_id)
        self._ids.append(token_id)
        return self._give(self._stream.step(self._tokenizer, token_id) or "")

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._give(self._tokenizer.decode(self._ids)[self._n_decoded :])

    def _keep(self, token_id: int) -> str:
        """The text of a special token, which the decoder would leave out; it begins anew behind it."""
        held, piece = self.flush(), token_text(self._tokenizer, token_id)
        self.n_chars += len(piece)
        self._begin(self._ids[-_CONTEXT:])
        return held + piece

    def _give(self, piece: str) -> str:
        self._n_decoded += len(piece)
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
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""As OpenAI's completions name it: by its text, or `bytes:\xe6\xbc` where that is no whole characters."""
    added = token_bytes(tokenizer, token_id)
    try:
        return added.decode()
    except UnicodeDecodeError:
        return f"bytes:{added.decode('utf-8', 'backslashreplace')}"


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What one token adds to a text, special tokens too: their text, and part of a character where that is a token."""
    token: str | None = tokenizer.id_to_token(token_id)
    decoder = tokenizer.decoder
    if token is None or decoder is None:
        return (token or "").encode()
    if decoder.decode(["x\u0120x"]) == "x x":  # a byte-level alphabet
        return (
            bytes(_BYTES[char] for char in token) if _BYTES.keys() >= set(token) else token.encode()
        )
    text: str = decoder.decode(["x", token])[
        1:
    ]  # behind something, for some take a space off the start of a text
    return bytes([int(token[3:5], 16)]) if text == _BROKEN and token != text else text.encode()
