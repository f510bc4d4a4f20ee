"""A tokenizer like Llama 2's."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers


def sentence_pieces() -> Tokenizer:
    """Make a tokenizer of letters, and of bytes for all others.

    Spaces are a letter of their own, put before any text and taken off it.
    """
    letters = ["\u2581", *"abde", "\u2581a", "\u00e5", "</s>"]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + letters
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    spaces = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made
