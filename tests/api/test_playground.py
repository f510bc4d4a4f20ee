"""The page and its files: headers, access, caching, and complete lists of modules."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.playground import STATIC
from tests.fake_runner import FakeRunner
from tests.serving import VOCAB_SIZE, fake_app

FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*"))
LOADED = re.compile(r"""(?<!<a )(?:src|href)="([^#"]+)"|from "(\.[^"]+)";""")
PRELOADED = re.compile(r'<link rel="modulepreload" href="static/([^"]+)">')
LINKED = re.compile(r'<a href="([^#"]+)"')
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:")


def relative(name: str, in_html: str, in_js: str) -> str:
    """Return the path, below `static`, of a file that the file `name` loads."""
    return in_html.removeprefix("static/") or posixpath.normpath(
        posixpath.join(posixpath.dirname(name), in_js)
    )


def client(**settings: Any) -> httpx.AsyncClient:
    app: FastAPI = fake_app(FakeRunner(VOCAB_SIZE), **settings)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
async def test_files_are_public_and_have_strict_headers(path: str) -> None:
    async with client(api_key="secret") as http:
        response = await http.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert (await http.head(path)).headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize(
    "path", ["/static/", "/static/none.js", "/static/../app.py", "/static/%2e%2e/app.py", "/static"]
)
async def test_other_files_cannot_be_read(path: str) -> None:
    async with client() as http:
        response = await http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_cached_files_are_not_sent_again() -> None:
    async with client() as http:
        first = await http.get("/static/app.js")
        again = await http.get("/static/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_allow_lists_the_methods_of_all_routes() -> None:
    async with client() as http:
        assert (await http.put("/")).headers["allow"] == "GET, HEAD, POST"
        assert (await http.put("/static/app.js")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("name", FILES)
def test_a_file_loads_only_others_of_the_page(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8")
    loaded = {relative(name, *found) for found in LOADED.findall(text)}
    assert loaded <= set(FILES)
    assert not INLINE.search(text if name.endswith((".html", ".svg")) else "")


async def test_links_lead_to_routes() -> None:
    links = set(LINKED.findall((STATIC / "index.html").read_text(encoding="utf-8")))
    async with client() as http:
        found = {link: (await http.get(f"/{link}")).status_code for link in links}
    assert 404 not in found.values(), found


def test_every_file_is_used() -> None:
    """Preloading alone does not count as use."""
    texts = {name: PRELOADED.sub("", (STATIC / name).read_text(encoding="utf-8")) for name in FILES}
    named = {
        relative(name, *found) for name, text in texts.items() for found in LOADED.findall(text)
    }
    assert named | {"index.html"} == set(FILES)


def test_all_modules_are_preloaded() -> None:
    """Importing one by one would cost a round trip to the server for each."""
    preloaded = PRELOADED.findall((STATIC / "index.html").read_text(encoding="utf-8"))
    assert sorted([*preloaded, "app.js"]) == [name for name in FILES if name.endswith(".js")]
