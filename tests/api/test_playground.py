"""The page and its files: headers, access, caching, and what joins them."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import httpx
from fastapi import FastAPI

from kvasir.server.api.playground import STATIC, joined
from tests.kit.fake_runner import FakeRunner
from tests.kit.serving import VOCAB_SIZE, fake_app

FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*"))
LOADED = re.compile(r"""(?<!<a )(?:src|href)="([^#"]+)"|from "(\.[^"]+)";""")
JOINED = ("page.css", "page.js")
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


async def test_files_are_public_and_have_strict_headers() -> None:
    async with client(api_key="secret") as http:
        for path in ("/", "/docs", *(f"/static/{name}" for name in (*FILES, *JOINED))):
            response = await http.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            head = await http.head(path, headers={"accept-encoding": "identity"})
            assert head.headers["content-length"] == str(len(response.content))


async def test_other_files_cannot_be_read() -> None:
    async with client() as http:
        for path in ("", "/", "/none.js", "/../app.py", "/%2e%2e/app.py"):
            response = await http.get(f"/static{path}")
            assert response.status_code == 404, path
            assert response.json()["error"]["code"] == "not_found"
    assert joined.cache_info().currsize <= len(JOINED)  # paths that clients invent are not kept


async def test_cached_files_are_not_sent_again() -> None:
    async with client() as http:
        for name in ("app.js", *JOINED):
            first = await http.get(f"/static/{name}")
            known = {"if-none-match": first.headers["etag"]}
            again = await http.get(f"/static/{name}", headers=known)
            assert (again.status_code, again.content) == (304, b"")


async def test_allow_lists_the_methods_of_all_routes() -> None:
    async with client() as http:
        assert (await http.put("/")).headers["allow"] == "GET, HEAD, POST"
        for name in ("app.js", "page.js"):
            answer = await http.post(f"/static/{name}")
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_a_file_loads_only_others_of_the_page() -> None:
    for name in FILES:
        text = (STATIC / name).read_text(encoding="utf-8")
        loaded = {relative(name, *found) for found in LOADED.findall(text)}
        assert loaded <= {*FILES, *JOINED}, name
        assert not INLINE.search(text if name.endswith((".html", ".svg")) else ""), name


async def test_links_lead_to_routes() -> None:
    pages = [(STATIC / name).read_text(encoding="utf-8") for name in ("index.html", "docs.html")]
    links = set(LINKED.findall("".join(pages)))
    async with client() as http:
        found = {link: (await http.head(f"/{link}")).status_code for link in links}
    assert 404 not in found.values(), found


def test_every_file_is_used_and_joined_once() -> None:
    pages = ("index.html", "docs.html")
    html = "".join((STATIC / name).read_text(encoding="utf-8") for name in pages)
    linked = {relative("index.html", *found) for found in LOADED.findall(html)}
    own = {"reference.js"}  # of docs.html, which loads the few that it imports as they are
    script, styles = joined("page.js").decode(), joined("page.css").decode()
    modules = re.findall(r"^// (\S+\.js)$", script, re.MULTILINE)
    assert sorted(modules) == [name for name in FILES if name.endswith(".js") and name not in own]
    assert not re.search(r"^(im|ex)port ", script, re.MULTILINE)
    for name in FILES:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert name in {*pages, *linked} or text in styles or name in modules


COMPRESSED = (
    *("gzip", "GZIP", "gzip;q=0.1", "br;q=1.0, gzip ; Q=0.8", "*", "gzip, *;q=0", "br, *;q=0.1"),
    *("gzip;q=1, identity;q=0.5", "identity;q=0, gzip;q=0.1"),
)
PLAIN = (
    *("", "identity", "br", "gzip;q=0", "*;q=0", "gzip;q=0.000, br", "*, gzip;q=0"),
    *("identity, *;q=0.5", "identity, gzip;q=0.5"),
    *("not-gzip", "gzip;q=x", "gzip;q=1e9", ";;,=,q=1"),
)


async def test_a_coding_is_negotiated() -> None:
    """RFC 9110, 12.5.3. What is no weight makes a coding unwanted; several lines are one list."""
    in_lines = [("accept-encoding", "br"), ("accept-encoding", "gzip")]
    async with client() as http:
        plain = await http.get("/static/page.js", headers={"accept-encoding": "identity"})
        small = await http.get("/static/page.js", headers=in_lines)
        for coding, every in (("gzip", COMPRESSED), (None, PLAIN)):
            for accepted in every:
                answer = await http.get("/static/page.css", headers={"accept-encoding": accepted})
                assert answer.status_code == 200
                assert answer.headers.get("content-encoding") == coding, accepted
                assert answer.headers["vary"] == "accept-encoding"
                assert answer.content == joined("page.css")
    assert plain.content == small.content == joined("page.js")
    assert small.headers["content-encoding"] == "gzip"
    assert int(small.headers["content-length"]) < len(plain.content) / 2
    assert plain.headers["etag"] != small.headers["etag"], "a cache tells the two apart"
