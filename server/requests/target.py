"""The languages of an encoder-decoder, the given beginning of its target, and the search."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from kvasir.model.directory import ModelDirectory
from kvasir.server.engine.sampling.params import BeamParams
from kvasir.server.errors import InvalidRequestError

# As mBART (fr_XX), NLLB (fra_Latn) and M2M-100 (__fr__) write languages.
_LANGUAGE = re.compile(r"(__)?([a-z]{2,3}(?:_[A-Z][A-Za-z]{1,3})?)(?(1)__)")
_N_SHOWN = 8  # languages in an error


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """A request's wishes: languages, the target's beginning, the width and rules of a search."""

    decoder_prompt: str = ""
    source_language: str | None = None
    target_language: str | None = None
    beams: BeamParams | None = None

    def check_supported(self, model_dir: ModelDirectory) -> None:
        """Raise InvalidRequestError if the model has no target, and something was asked of it."""
        asked = {
            "decoder_prompt": self.decoder_prompt,
            "source_language": self.source_language,
            "target_language": self.target_language,
            "num_beams": self.beams,
        }
        for name, value in asked.items():
            if value and model_dir.config.encoder is None:
                raise InvalidRequestError(
                    f"{name} is for models with an encoder, which this one is not; leave it out",
                    param=name,
                )


def target_prefix(model_dir: ModelDirectory, language: str | None) -> list[int]:
    """Return the tokens that begin every target, with another language than the model's own.

    A language's token takes the place of the model's, or follows the token that starts a target,
    as a forced one does in transformers. Raises InvalidRequestError for an unknown language.
    """
    prefix = list(model_dir.config.target_prefix)
    if language is None:
        return prefix
    codes = languages(model_dir.tokenizer)
    token_id = _language_id(codes, language, "target_language")
    rest = [token for token in prefix if token not in codes.values()]
    return [*rest[:1], token_id, *rest[1:]]


def source_ids(tokenizer: Tokenizer, encoding: Encoding, language: str) -> list[int]:
    """Return a source's tokens, with its language's in place of the one that the tokenizer added.

    If that added none, it comes first. Raises InvalidRequestError for an unknown language.
    """
    codes = languages(tokenizer)
    token_id = _language_id(codes, language, "source_language")
    both = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    places = [i for i, (token, added) in enumerate(both) if added and token in codes.values()]
    if not places:
        return [token_id, *encoding.ids]
    return [token_id if i in places else token for i, token in enumerate(encoding.ids)]


def _language_id(codes: dict[str, int], language: str, param: str) -> int:
    """Return the token of a language. Raises InvalidRequestError for an unknown one."""
    if language in codes:
        return codes[language]
    names = sorted(codes)
    shown = ", ".join(names[:_N_SHOWN]) + (", …" if len(names) > _N_SHOWN else "")
    problem = f"{language!r} is not among its {len(names)}: {shown}"
    raise InvalidRequestError(
        f"{param}: {problem if names else 'this model has no tokens of languages'}", param=param
    )


def languages(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens of languages, by code: the special tokens that look like one."""
    added = tokenizer.get_added_tokens_decoder().items()
    matches = ((_LANGUAGE.fullmatch(token.content), i) for i, token in added if token.special)
    return {match[2]: i for match, i in matches if match is not None}
