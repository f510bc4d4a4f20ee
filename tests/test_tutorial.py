"""The tutorial's code runs, page by page, and its assertions hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs/tutorial").glob("[0-9]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page(page: Path) -> None:
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)  # noqa: S102  our own pages
