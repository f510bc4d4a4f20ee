"""What a package index shows of a release: links that lead somewhere from there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.deploy.index_page import project, readme

ROOT = Path(__file__).parents[2]
HOME = "https://github.com/owner/name"


def test_every_link_of_the_readme_names_a_file_of_the_release() -> None:
    page = readme((ROOT / "README.md").read_text(encoding="utf-8"), HOME, "v1")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    assert len(links) > 10
    for image, link in links:
        if link.startswith("#"):
            continue
        where, _, path = link.removeprefix(f"{HOME}/").partition("/v1/")
        assert where == ("raw" if image else "blob")
        assert (ROOT / path).exists()


def test_the_project_has_urls_and_remains_what_it_is() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    made, before = tomllib.loads(project(text, HOME, "v1")), tomllib.loads(text)
    assert all(url.startswith(HOME) for url in made["project"].pop("urls").values())
    assert made == before
