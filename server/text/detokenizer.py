"""Incremental text from tokens: only whole characters, and nothing that may begin a stop string."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Prompt tokens given to the decoder: some decoders treat the start of a text specially.
_CONTEXT = 8
_MOST_HELD = 16  # tokens: each is decoded again with every one that is held after it
_BROKEN = "\ufffd"  # the character that decoders show for bytes that are none, or not yet
# The byte-level alphabet of GPT-2 (Radford et al. 2019): printable bytes stand for themselves, the
# others follow from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Detokenizer:
    """The text of one sequence, piece by piece.

    A character whose bytes are incomplete is held back until `flush`, or until too many tokens show
    that they make none. Special tokens have no text, except those in `kept`. n_chars: characters
    returned so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), kept: Container[int] = ()
    ) -> None:
        self._tokenizer, self._kept = tokenizer, kept
        self.n_chars = 0
        self._held: list[int] = []  # tokens whose text has not been returned
        self._begin(list(prompt_ids[-_CONTEXT:]))

    def _begin(self, context: list[int]) -> None:
        if self._tokenizer.decode(context).endswith(_BROKEN):
            context = []  # a prompt cut inside a character gives no context
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        self._ids = context

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        if token_id in self._kept:
            piece = self.flush() + self._count(token_text(self._tokenizer, token_id))
            self._begin(self._ids[-_CONTEXT:])  # the decoder would leave the special token out
            return piece
        self._ids.append(token_id)
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # some decoders show no byte next to a broken one, even if it was shown
            return self._take(len(self._held))
        if piece:
            self._held.clear()
        elif len(self._held) > _MOST_HELD:
            return self._take(self._whole())
        return self._count(piece)

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""
        text, self._held = self._text(len(self._held)), []
        return self._count(text)

    def _text(self, n: int) -> str:
        """Return the text of the first held tokens, after those before them if it leaves theirs."""
        taken, decode = self._held[:n], self._tokenizer.decode
        end = len(self._ids) - len(self._held)
        context = self._ids[max(0, end - _CONTEXT) : end]
        before, whole = decode(context), decode(context + taken)
        return whole[len(before) :] if whole.startswith(before) else decode(taken)

    def _whole(self) -> int:
        """Return how many held tokens come before a character that may yet be completed."""
        held, decode = self._held, self._tokenizer.decode
        cuts = range(len(held) - 1, 0, -1)
        whole = decode(held)
        apart = (n for n in cuts if decode(held[:n]) + decode(held[n:]) == whole)
        return next(apart, len(held)) if whole.endswith(_BROKEN) else len(held)

    def _take(self, n: int) -> str:
        """Return the text of the first held tokens; the others begin a text of their own."""
        text, left = self._count(self._text(n)), self._held[n:]
        self._held = []
        self._begin([] if left else self._ids[-_CONTEXT:])
        return text + "".join(map(self.push, left))

    def _count(self, piece: str) -> str:
        self.n_chars += len(piece)
        return piece


def decoded_starts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return where each token begins in the text that the tokens decode to."""
    text = Detokenizer(tokenizer)
    starts = []
    for token_id in ids:
        starts.append(text.n_chars)
        text.push(token_id)
    return starts


class StopChecker:
    """A search for the stop string that is complete first, the longest of several.

    Text that may begin one is held back; the stop string and what follows it are never returned.
    stop_string: that has ended it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text."""
        return self.stop_string is not None

    def push(self, text: str) -> str:
        """Return the text that is safe to show."""
        if self.stopped:
            return ""
        buffer = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.stop_string, self._held = buffer[at:end], ""
            return buffer[:at]
        begins = range(max(0, len(buffer) - self._longest + 1), len(buffer))
        begun = (at for at in begins if any(s.startswith(buffer[at:]) for s in self._stops))
        at = next(begun, len(buffer))
        self._held = buffer[at:]
        return buffer[:at]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, also a special one's; incomplete characters show as U+FFFD."""
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Name a token as OpenAI does: its text, or `bytes:\xe6\xbc` where that is not UTF-8."""
    added = token_bytes(tokenizer, token_id)
    text = added.decode("utf-8", "backslashreplace")
    return text if text.encode() == added else f"bytes:{text}"


@lru_cache(2**14)  # a log-probability has some twenty
def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes that a token, also a special one, adds to a text."""
    token: str | None = tokenizer.id_to_token(token_id)
    decoder = tokenizer.decoder
    if token is None or decoder is None:
        return (token or "").encode()
    if decoder.decode(["x\u0120x"]) == "x x":  # a byte-level alphabet
        is_encoded = _BYTES.keys() >= set(token)
        return bytes(_BYTES[char] for char in token) if is_encoded else token.encode()
    # Some decoders strip a space off the start of a text, so the token follows another.
    text: str = decoder.decode(["x", token])[1:]
    return bytes([int(token[3:5], 16)]) if text == _BROKEN and token != text else text.encode()
