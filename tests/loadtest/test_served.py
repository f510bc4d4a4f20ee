"""What a load test asks of the server before it starts, and in which words it gives up."""

from __future__ import annotations

import socket

import pytest

from loadtest.locust.served import NotServedError, ServedModel, query_model
from server.requests.admission import Phase
from tests.live import KEY, live
from tests.serving import fake_bundle

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("has_chat", [True, False])
def test_a_server_is_asked_for_its_context_and_whether_it_chats(has_chat: bool) -> None:
    with live(bundle=fake_bundle() if has_chat else fake_bundle(chat_template=None)) as served:
        assert query_model(served.url, HEADERS) == ServedModel(max_model_len=64, has_chat=has_chat)


def test_a_wrong_key_is_no_missing_template() -> None:
    with (
        live() as served,
        pytest.raises(NotServedError, match="/v1/models answers HTTP 401: no valid API key"),
    ):
        query_model(served.url, {})


def test_a_server_that_takes_no_more_is_no_missing_template() -> None:
    with live() as served:
        query_model(served.url, HEADERS)
        served.service.admission.phase = Phase.DRAINING
        with pytest.raises(NotServedError, match="/v1/chat/completions answers HTTP 503: "):
            query_model(served.url, HEADERS)


def test_where_nobody_listens_it_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(
        NotServedError, match=f"{url} does not answer as a server should: .*refused"
    ):
        query_model(url, {})


def test_what_is_no_url_is_said() -> None:
    with pytest.raises(NotServedError, match="unknown url type"):
        query_model("localhost", {})
