"""The batches view: files of requests, their progress and their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.playground import answer


@pytest.fixture
def page(open_page: Callable[..., Page], url: str) -> Page:
    return open_page(f"{url}/#batches")


def request(number: int, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"x = {number}", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def upload(page: Page, name: str, lines: Sequence[dict[str, Any]]) -> Locator:
    """Create a batch, and return its item of the list."""
    buffer = "\n".join(map(json.dumps, lines)).encode()
    file = {"name": name, "mimeType": "application/jsonl", "buffer": buffer}
    page.get_by_label("File of requests").set_input_files(files=[file])
    page.get_by_role("button", name="Create batch").press("Enter")
    return page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=name))


def save(page: Page, button: Locator, path: Path) -> list[dict[str, Any]]:
    """Press a button that saves lines of JSON, and return them."""
    with page.expect_download() as saved:
        button.press("Enter")
    saved.value.save_as(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_is_answered(
    page: Page, url: str, tmp_path: Path, check_looks: Callable[[Page, str], None]
) -> None:
    item = upload(page, "mixed.jsonl", [request(1), request(2), request(3, max_tokens=-5)])
    expect(item).to_have_attribute("data-status", "completed")
    expect(item).to_contain_text("3 of 3 done, 1 with errors")
    expect(page.get_by_role("status")).to_contain_text("mixed.jsonl: completed")
    for one in save(
        page, item.get_by_role("button", name="Answers of mixed.jsonl"), tmp_path / "a"
    ):
        same = answer(page, url, request(int(one["custom_id"]))["body"])
        assert one["response"]["body"]["choices"] == same["choices"]
    [error] = save(page, item.get_by_role("button", name="Errors of mixed.jsonl"), tmp_path / "e")
    assert (error["custom_id"], error["response"]["status_code"]) == ("3", 400)
    check_looks(page, "batches-completed")
    page.reload()
    expect(item).to_have_attribute("data-status", "completed")


def test_a_batch_is_cancelled(page: Page, check_looks: Callable[[Page, str], None]) -> None:
    item = upload(page, "long.jsonl", [request(n, max_tokens=900, n=16) for n in range(99)])
    expect(item).to_have_attribute("data-status", "in_progress")
    expect(item.get_by_role("progressbar", name="long.jsonl")).to_be_visible()
    check_looks(page, "batches-running")
    item.get_by_role("button", name="Cancel long.jsonl").press("Enter")
    expect(item).to_have_attribute("data-status", "cancelled")
    expect(item).to_be_focused()  # the button is gone


def test_a_file_that_is_no_batch_says_why(page: Page) -> None:
    error = page.locator("#batch-error")
    page.get_by_label("File of requests").set_input_files(
        files=[{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"a note\n"}]
    )
    page.get_by_role("button", name="Create batch").click()
    expect(error).to_contain_text("notes.txt is no request with a url: a note")
    item = upload(page, "twice.jsonl", [request(1)] * 9)
    expect(item).to_have_attribute("data-status", "failed")
    expect(error).to_be_hidden()
    expect(item).to_contain_text("line 2:")
    expect(item).to_contain_text("and 3 more")


@pytest.mark.refusals
def test_a_refused_batch_leaves_no_file(page: Page, url: str) -> None:
    lines = [request(1) | {"url": "/v1/nothing"}]
    upload(page, "nothing.jsonl", lines)
    expect(page.locator("#batch-error")).to_contain_text("/v1/nothing")
    names = [one["filename"] for one in page.request.get(f"{url}/v1/files").json()["data"]]
    assert "nothing.jsonl" not in names


@pytest.mark.parametrize("model", ["stdlib", "numbers"])
def test_the_example_is_a_batch(
    model: str, open_page: Callable[..., Page], models_url: str, tmp_path: Path
) -> None:
    page = open_page(f"{models_url}/?model={model}#batches")
    lines = save(page, page.get_by_role("button", name="Download an example"), tmp_path / "lines")
    item = upload(page, f"{model}.jsonl", lines)
    expect(item).to_have_attribute("data-status", "completed")
    expect(item.get_by_role("button", name="Errors")).to_be_hidden()


@pytest.mark.refusals
def test_a_server_without_batches_says_so(
    open_page: Callable[..., Page], chat_url: str, axe_findings: Callable[[Page], list[str]]
) -> None:
    page = open_page(f"{chat_url}/#batches")
    expect(page.locator("#batches-off")).to_contain_text("setting batch_dir")
    expect(page.get_by_label("File of requests")).to_be_hidden()
    assert axe_findings(page) == []
