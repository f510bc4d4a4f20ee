"""The fields of bodies that only encoder-decoders take."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir.server.api.schemas import RequestBody
from kvasir.server.engine.sampling.params import BeamParams
from kvasir.server.requests.target import TargetOptions

MAX_BEAMS = 16
# A search keeps the likeliest texts of the raw model, whole.
_NOT_SEARCHED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "do_sample", "min_tokens"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("stop", "response_format", "regex", "grammar", "logprobs", "top_n_tokens"),
    *("json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "ebnf", "best_of", "prompt_logprobs"),
)


class TargetFields(RequestBody):
    """The fields of a target, which an encoder-decoder writes for a prompt, its source."""

    decoder_prompt: str = Field("", description="Encoder-decoders: the text to continue.")
    target_language: str | None = Field(
        None,
        description="Encoder-decoders: the language of the text, as the tokenizer's special tokens "
        "name it: `fr_XX`, `fra_Latn`, `fr`.",
    )
    source_language: str | None = Field(
        None,
        description="Encoder-decoders: the language of the source, which is text, by such a name.",
    )
    num_beams: int = Field(
        1,
        ge=1,
        le=MAX_BEAMS,
        description="Encoder-decoders: search for the likeliest texts, with so many beams; "
        "`n` returns the best. There is no sampling, and a stream has one event for each text.",
    )
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] = Field(
        1.0,
        description="With beams: a text's `score` is its log-probability / length^this.",
    )
    early_stopping: bool | Literal["never"] = Field(
        False,
        description="With beams: true ends at `num_beams` finished texts, false once no other is "
        "likely to be better, `never` once none can be.",
    )

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != TargetFields.model_fields[name].default:
                    raise ValueError(f"{name} is of a beam search; give num_beams, too")
            return self
        for name in _NOT_SEARCHED:
            field = type(self).model_fields.get(name)
            if field is None or name not in self.model_fields_set:
                continue
            value = getattr(self, name)
            if value != field.default and (name != "temperature" or value > 0.0):
                raise ValueError(f"num_beams searches for the likeliest texts; leave {name} out")
        return self

    def target(self) -> TargetOptions:
        """Return what is asked of the target."""
        beams = None
        if self.num_beams > 1:
            beams = BeamParams(self.num_beams, self.length_penalty, self.early_stopping)
        return TargetOptions(self.decoder_prompt, self.source_language, self.target_language, beams)
