"""What OpenAI's routes have in common: the model's name, usage, log-probabilities that JSON can hold."""

from __future__ import annotations

from typing import Any

from server.completion import Completion
from server.errors import ModelNotFoundError
from server.service import Service

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def check_model(service: Service, name: str | None) -> None:
    """Raises ModelNotFoundError for a name other than that of the model that is served."""
    served = service.settings.model_name
    if name not in (None, served):
        raise ModelNotFoundError(f"the model {name!r} is not served here; {served!r} is", param="model")


def finite(logprob: float) -> float:
    return max(_LOWEST_LOGPROB, logprob)  # in this order NaN is replaced too


def usage(completion: Completion) -> dict[str, Any]:
    prompt, generated = completion.n_prompt_tokens, completion.n_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": completion.n_cached_tokens},
    }
