"""The target of an encoder-decoder: its given beginning, and the search for its text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

from model.bundle import ModelBundle
from server.engine.sampling import BeamParams
from server.errors import InvalidRequestError

# As mBART (fr_XX), NLLB (fra_Latn) and M2M-100 (__fr__) write languages.
_LANGUAGE = re.compile(r"(__)?([a-z]{2,3}(?:_[A-Z][A-Za-z]{1,3})?)(?(1)__)")
_N_SHOWN = 8  # languages in an error


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What a request asks of a target: how it begins, and the width and rules of a search."""

    decoder_prompt: str = ""
    language: str | None = None
    beams: BeamParams | None = None

    def check_supported(self, bundle: ModelBundle) -> None:
        """Raise InvalidRequestError if the model has no target, and something was asked of it."""
        asked = {
            "decoder_prompt": self.decoder_prompt,
            "target_language": self.language,
            "num_beams": self.beams,
        }
        for name, value in asked.items():
            if value and bundle.config.encoder is None:
                raise InvalidRequestError(
                    f"{name} is for models with an encoder, which this one is not; leave it out",
                    param=name,
                )


def target_prefix(bundle: ModelBundle, language: str | None) -> list[int]:
    """Return the tokens that begin every target, with another language than the model's own.

    A language's token takes the place of the model's, or follows the token that starts a target,
    as a forced one does in transformers. Raises InvalidRequestError for an unknown language.
    """
    prefix = list(bundle.config.target_prefix)
    if language is None:
        return prefix
    known = languages(bundle.tokenizer)
    if language not in known:
        names = sorted(known)
        shown = ", ".join(names[:_N_SHOWN]) + (", …" if len(names) > _N_SHOWN else "")
        problem = f"{language!r} is not among its {len(names)}: {shown}"
        raise InvalidRequestError(
            f"target_language: {problem if names else 'this model has no tokens of languages'}",
            param="target_language",
        )
    others = [token_id for token_id in prefix if token_id not in known.values()]
    return [*others[:1], known[language], *others[1:]]


def languages(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens of languages, by code: the special tokens that look like one."""
    added = tokenizer.get_added_tokens_decoder().items()
    found = ((_LANGUAGE.fullmatch(token.content), i) for i, token in added if token.special)
    return {match[2]: i for match, i in found if match is not None}
