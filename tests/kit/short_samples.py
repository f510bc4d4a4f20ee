"""Less of the text that Python brings, for tests that export without text of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics

import pytest

from kvasir.export.verification import vectors

_N_TOPICS, _N_PAIRS = 8, 80


def shorten_samples() -> Iterator[None]:
    """Keep a tenth of the prose and a fifth of the docstrings: what a module makes a fixture of."""
    few = dict(islice(sorted(topics.items()), _N_TOPICS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pydoc_data.topics.topics", few)
        patch.setattr(vectors, "_MOST", _N_PAIRS)
        yield
