"""A load test asks the server about its model before it starts, or says why it cannot."""

from __future__ import annotations

import socket

import pytest

from kvasir.loadtest.locust.served import NotServedError, ServedModel, query_model
from kvasir.server.requests.admission.queue import Phase
from tests.live import KEY, live
from tests.serving import fake_bundle

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("has_chat", [True, False])
def test_a_server_is_asked_for_its_context_and_whether_it_chats(has_chat: bool) -> None:
    with live(bundle=fake_bundle() if has_chat else fake_bundle(chat_template=None)) as served:
        assert query_model(served.url, HEADERS) == ServedModel(max_model_len=64, has_chat=has_chat)


def test_an_invalid_key_is_not_a_missing_template() -> None:
    with (
        live() as served,
        pytest.raises(NotServedError, match="/v1/models answers HTTP 401: no valid API key"),
    ):
        query_model(served.url, {})


def test_a_draining_server_is_not_a_missing_template() -> None:
    with live() as served:
        query_model(served.url, HEADERS)
        served.service.admission.phase = Phase.DRAINING
        with pytest.raises(NotServedError, match="/v1/chat/completions answers HTTP 503: "):
            query_model(served.url, HEADERS)


def test_a_missing_server_and_an_invalid_url_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(NotServedError, match=f"{url}/.*refused"):
        query_model(url, {})
    with pytest.raises(NotServedError, match="unknown url type"):
        query_model("localhost", {})
