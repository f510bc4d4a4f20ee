"""What tools ask of an answer, over HTTP: calls that can be used, whatever the model, its tokens and the request."""

from __future__ import annotations

import pytest

from tests.test_chat_completions import HERMES_TEXT, TOOLS, chatting, events, joined, post, without_ids


@pytest.mark.parametrize(
    ("stop", "n_calls", "finish_reason"),
    [("Rome", 1, "stop"), ("}", 1, "stop"), ('"utc', 2, "stop"), ("</tool", 1, "tool_calls"), ("\n<", 0, "stop")],
)
async def test_a_call_that_is_cut_short_is_no_reason_to_finish(stop: str, n_calls: int, finish_reason: str) -> None:
    """Clients read the arguments of calls where the reason is tool_calls, so they must have come to their end."""
    async with chatting(HERMES_TEXT) as (served, _, _):
        choice = (await post(served, tools=TOOLS, stop=stop))["choices"][0]
        chunks = await events(served, tools=TOOLS, stop=stop)
    assert len(choice["message"].get("tool_calls", [])) == n_calls
    assert choice["finish_reason"] == finish_reason
    assert without_ids(joined(chunks)) == without_ids(choice)
