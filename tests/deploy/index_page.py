"""Make README.md and pyproject.toml fit for the package index: absolute links, and URLs.

python tests/deploy/index_page.py https://github.com/OWNER/NAME v1.2.3 rewrites both, before a
release is built. It needs no package.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
_PICTURES = (".gif", ".png")


def readme(text: str, home: str, tag: str) -> str:
    """Return the README with links to files of a release; `home` is the repository's URL."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(_PICTURES) else "blob"
        return f"]({home}/{kind}/{tag}/{link[1]})"

    return _LINK.sub(absolute, text)


def project(text: str, home: str, tag: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    urls = {
        "Source": home,
        "Documentation": f"{home}/tree/{tag}/docs",
        "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return text.replace("\n[project.scripts]\n", f"\n[project.urls]\n{lines}\n[project.scripts]\n")


if __name__ == "__main__":
    for name, rewrite in (("README.md", readme), ("pyproject.toml", project)):
        page = ROOT / name
        page.write_text(rewrite(page.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")
