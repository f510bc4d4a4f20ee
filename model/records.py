"""The contents of a model directory's files: measurements, sampling, prompts of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvasir.model.platform.suggestions import first_problem


class Record(BaseModel):
    """The contents of a file of JSON, which may hold nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# Of mean KL, in nats. Rounding of 8 bits without outliers costs 0.0002, of 4 bits 0.004.
_LOSSES = ((0.001, "nothing that shows"), (0.01, "little"), (0.05, "something"))


class SpanFigures(Record):
    """Figures of `tokens` tokens at positions `first` to `last` of their rows."""

    first: int
    last: int
    tokens: int
    mean_kl: float
    kl_99: float
    greedy_agreement: float


class LayerFigures(Record):
    """The cost of one layer, or of the embedding, where all else is PyTorch's.

    error: the deviation of what it adds from what PyTorch adds, relative to that. gain: the share
    of PyTorch's that is in what it adds; only a wrong scale makes it another than about 1.
    """

    layer: str
    mean_kl: float
    error: float
    gain: float


class Verification(Record):
    """Figures that `export` measured: ONNX Runtime against PyTorch, over the same given tokens.

    mean_kl, kl_99: the mean and the 99th percentile over `positions` of KL(PyTorch || graph), the
    divergence of the next token's distributions in nats. by_position: the same by position.
    max_logit_error: the largest absolute difference, relative to the logits' standard deviation.
    greedy_agreement: the share of positions where both hold the same token the likeliest. Both are
    of `positions` tokens. near_ties: how many of the others have their two likeliest tokens within
    a tenth of a deviation in PyTorch. The perplexities are on `text`, of the tokens after each
    row's prompt.
    perplexity_error: the standard error of their relative difference, from those tokens.
    longest: the tokens of the longest row. error_growth: the mean error of a token (the
    deviation of its logits' errors over that of its logits) in the worst 128 positions, over that
    of the first 128, or over 2 % if that is less.

    Where a model makes vectors of texts, `positions` are texts, and the numbers of their vectors
    count as logits. The cosines are of both vectors, for a classifier those before its head.
    retrieval_torch, retrieval_onnx: the share of the pairs of `text` whose second half is the
    nearest to the first. retrieval_error: the standard error of their difference.

    exact_match_torch, exact_match_onnx: of an encoder-decoder, the share of the pairs of `text`
    whose target is the greedy answer; exact_match_error is as retrieval_error.

    own: by operators of our own where these compute the model, which the other figures are not.
    """

    mean_kl: float | None = None
    kl_99: float | None = None
    max_logit_error: float
    greedy_agreement: float
    near_ties: int | None = None
    mean_cosine: float | None = None
    least_cosine: float | None = None
    retrieval_torch: float | None = None
    retrieval_onnx: float | None = None
    retrieval_error: float | None = None
    exact_match_torch: float | None = None
    exact_match_onnx: float | None = None
    exact_match_error: float | None = None
    perplexity_torch: float | None = None
    perplexity_onnx: float | None = None
    perplexity_error: float | None = None
    text: str | None = None
    positions: int | None = None
    longest: int | None = None
    error_growth: float | None = None
    by_position: list[SpanFigures] | None = None
    by_layer: list[LayerFigures] | None = None
    own: Verification | None = None

    @property
    def _lost(self) -> float:
        return self.mean_kl or 1.0 - (self.mean_cosine or 1.0)

    @property
    def verdict(self) -> str:
        """A sentence on what is lost, by those operators that lose more."""
        if self.own is not None and self.own._lost > self._lost:
            return self.own.verdict
        if self.mean_cosine is not None:
            return (
                f"the mean cosine of its vectors and PyTorch's is {self.mean_cosine:.5f}, "
                f"the least {self.least_cosine:.5f}"
            )
        if self.mean_kl is None:  # of an older export
            return f"{self.greedy_agreement:.1%} of likeliest tokens are PyTorch's"
        loss = next((words for most, words in _LOSSES if self.mean_kl < most), "much")
        return (
            f"{loss} is lost: {self.greedy_agreement:.1%} of likeliest tokens are PyTorch's, "
            f"mean KL {self.mean_kl:.1e}"
        )


_GREEDY_BELOW = 1e-5  # a smaller temperature would overflow float32

# Ranges of sampling parameters, for models' defaults and for requests.
Temperature = Annotated[
    float,
    Field(ge=0.0, le=100.0),
    AfterValidator(lambda value: 0.0 if value < _GREEDY_BELOW else value),
]
TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]


class _Defaults(Record):
    """A file that the model brings, with what requests do not set."""

    file: ClassVar[str]

    @classmethod
    def parse(cls, files: Mapping[str, bytes]) -> Self:
        """Return those among files, contents by name, if any. Raises ValueError."""
        try:
            return cls.model_validate_json(files.get(cls.file, b"{}"))
        except ValueError as error:
            raise ValueError(f"{cls.file}: {first_problem(error, cls.model_fields)}") from None


class GenerationDefaults(_Defaults):
    """The model's recommended sampling, for requests that do not set their own."""

    file = "generation_config.json"
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    typical_p: TopP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    def given(self) -> dict[str, float]:
        """Return the fields that are set, by name."""
        return self.model_dump(exclude_none=True)


class EmbeddingDefaults(_Defaults):
    """The texts that an embedding model wants before inputs, by the name of their purpose.

    similarity_fn_name: the measure between vectors that it was trained for.
    """

    file = "config_sentence_transformers.json"
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.default_prompt_name not in (None, *self.prompts):
            raise ValueError(f"default_prompt_name {self.default_prompt_name!r} has no prompt")
        return self
