"""Vectors and scores as answers show them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from kvasir.model.config import Pooling
from kvasir.server.engine.sampling.params import Floats


def unit(vector: Floats) -> Floats:
    """Return the vector [d] of length 1 in the same direction; one of zeros as it is."""
    length = np.sqrt(np.dot(vector, vector))
    return vector / length if length else vector


def cosine(first: Floats, second: Floats) -> float:
    """Return the cosine of the angle between two vectors [d]."""
    return float(np.dot(unit(first), unit(second)))


def shortened(vector: Floats, n: int | None) -> Floats:
    """Return the first n numbers of a vector [d], made of length 1; None: the vector as it is."""
    return vector if n is None else unit(vector[:n])


def base64(array: Floats) -> str:
    """Return the base64 of an array's numbers as float32, little-endian."""
    return b64encode(array.astype("<f4").tobytes()).decode()


FORMATS: dict[str, Callable[[Floats], Any]] = {"float": np.ndarray.tolist, "base64": base64}


def shares(scores: Floats, pooling: Pooling) -> list[float]:
    """Return the probabilities of labels [n_labels] from the scores that the model computes.

    Those of labels that exclude each other sum to 1.
    """
    exact = scores.astype(np.float64)
    if len(scores) == 1 or pooling.label_activation == "sigmoid":
        exact = np.tanh(exact / 2) / 2 + 0.5  # the sigmoid, without overflow
    else:
        exact = np.exp(exact - exact.max())
        exact /= exact.sum()
    return [float(share) for share in exact]


def best_first(scores: Floats) -> list[int]:
    """Return the places of scores [n], the highest score's first."""
    return [int(place) for place in np.argsort(-scores, kind="stable")]


def usage(n_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens, of which all are the inputs'."""
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
