"""`kvasir chat`: any server's streams, conversations, slash commands, and a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Semaphore, Timer
from typing import Any

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.commands.console.chat_client import ChatClient, ChatError
from kvasir.commands.console.conversation import COMMANDS, Conversation
from tests.kit.fake_completions import FakeCompletions as Server
from tests.kit.fake_completions import fake_completions
from tests.kit.fake_runner import TIMEOUT

EXAMPLE = str(Path(__file__).parents[2] / "examples/stdlib")
NO_TEMPLATE = 400, b'{"error": {"message": "this model has no chat template: export it"}}'


def events(*choices: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    lines = (json.dumps({"choices": [choice]}) for choice in choices)
    return b"".join(f": comment\n\ndata: {line}\n\n".encode() for line in lines) + end


def said(*texts: str, name: str = "content") -> bytes:
    return events(*({"delta": {name: text}} for text in texts))


def answering(*contents: bytes | tuple[int, bytes]) -> list[tuple[int, list[bytes]]]:
    """Answers of a server, with status 200 unless another is given."""
    both = ((200, one) if isinstance(one, bytes) else one for one in contents)
    return [(status, [content]) for status, content in both]


@pytest.fixture
def server() -> Iterator[Server]:
    with fake_completions() as fake:
        yield fake
        if fake.step is not None:
            fake.step.release(100)


@pytest.fixture
def conversation(server: Server) -> Conversation:
    told = list[str]()
    client = ChatClient(f"{server.url}/v1/", api_key="k", timeout=60.0)
    return Conversation(client, told.append)


def answer(conversation: Conversation, line: str) -> str:
    return "".join(delta.text for delta in conversation.answer(line))


def test_a_conversation_is_sent_as_a_whole(server: Server, conversation: Conversation) -> None:
    server.answers = answering(said("Hel", "lo"), said("Fine"), said("Good"))
    conversation.system, conversation.fields = "Be kind", {"temperature": 0}
    assert [answer(conversation, "Hi"), answer(conversation, "How?")] == ["Hello", "Fine"]
    asked = conversation.command("/again")
    assert asked == "How?"
    assert answer(conversation, asked) == "Good"
    last = [("system", "Be kind"), ("user", "Hi"), ("assistant", "Hello"), ("user", "How?")]
    for body in server.bodies[1:]:
        assert [(one["role"], one["content"]) for one in body["messages"]] == last
        assert (body["model"], body["temperature"]) == ("some/model", 0)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}
    assert conversation.messages[-1]["content"] == "Good"


def test_reasoning_is_told_apart_and_not_sent_back(
    server: Server, conversation: Conversation
) -> None:
    for name in ("reasoning_content", "reasoning"):
        both = events({"delta": {name: "hm", "content": None}}, {"delta": {"content": "42"}})
        server.answers = answering(both)
        deltas = [(delta.text, delta.is_reasoning) for delta in conversation.answer("x")]
        assert deltas == [("hm", True), ("42", False)]
        assert conversation.messages[-1]["content"] == "42"


def test_a_model_without_a_template_continues_text(
    server: Server, conversation: Conversation
) -> None:
    server.answers = answering(NO_TEMPLATE, events({"text": " upon"}), events({"text": " a time"}))
    assert answer(conversation, "Once") == " upon"
    assert answer(conversation, "") == " a time"
    assert server.paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert server.bodies[-1]["prompt"] == "Once upon"
    assert server.bodies[-1]["max_tokens"] == 32  # half of what fits
    assert conversation.text == "Once upon a time"
    server.answers = answering(events({"text": " mattress"}))
    asked = conversation.command("/again")
    assert asked == ""
    assert answer(conversation, asked) == " mattress"
    assert server.bodies[-1]["prompt"] == "Once upon"
    assert conversation.text == "Once upon mattress"


def test_an_encoder_decoder_answers_each_line_by_itself(
    server: Server, conversation: Conversation
) -> None:
    server.about["max_source_len"] = 64
    conversation.client = ChatClient(server.url, timeout=60.0)
    texts = (events({"text": text}) for text in ("un", "deux", "zwei"))
    server.answers = answering(NO_TEMPLATE, *texts)
    assert [answer(conversation, line) for line in ("one", "", "two")] == ["un", "", "deux"]
    assert answer(conversation, conversation.command("/again") or "") == "zwei"
    assert [body.get("prompt") for body in server.bodies] == [None, "one", "two", "two"]


def test_a_failed_answer_can_be_tried_again(server: Server, conversation: Conversation) -> None:
    server.answers = answering(said("one"), (500, b"no"), said("two"))
    answer(conversation, "Hi")
    conversation.command("/again")
    with pytest.raises(ChatError):
        answer(conversation, "Hi")
    assert conversation.messages[-1]["content"] == "one"
    asked = conversation.command("/again")
    assert asked is not None
    assert answer(conversation, asked) == "two"
    assert [one["content"] for one in conversation.messages] == ["Hi", "two"]
    assert len(server.bodies[-1]["messages"]) == 1


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (500, b'{"error": {"message": "no\\nroom"}}', "no room (HTTP 500)"),
        (404, b'{"detail": "Not Found"}', "Not Found"),
        (502, b"<html>bad gateway", "<html>bad gateway (HTTP 502)"),
        (200, events(end=b'data: {"error": {"message": "it ended"}}\n\n'), "it ended"),
        (200, b"data: {\n\n", "the server sent no JSON: b'{'"),
        (200, b'data: {"choices": null}\n\ndata: ["odd"]\n\n', "['odd']"),
    ],
)
def test_an_error_is_one_line_and_the_question_is_forgotten(
    status: int, content: bytes, message: str, server: Server, conversation: Conversation
) -> None:
    server.answers = answering((status, content), said("ok"))
    with pytest.raises(ChatError, match=re.escape(message)):
        answer(conversation, "Hi")
    assert answer(conversation, "Hi again") == "ok"
    assert len(server.bodies[-1]["messages"]) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_a_server_that_is_not_there_is_an_error_of_one_line(url: str) -> None:
    result = CliRunner().invoke(app, ["chat", url])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"no answer from {url}" in result.stderr


def test_commands_change_the_conversation(conversation: Conversation, tmp_path: Path) -> None:
    told: list[str] = []
    conversation.notify = told.append
    for line in ("/set temperature=0.5", "/set stop=end", "/set temperature=", "/system Be brief"):
        assert conversation.command(line) is None
    assert (conversation.fields, conversation.system) == ({"stop": "end"}, "Be brief")
    assert conversation.command("/agian") is None
    assert told[-1] == "no such command: /agian; did you mean /again"
    conversation.messages = [{"role": "user", "content": "ä"}]
    for _ in range(2):
        conversation.command(f"/save {tmp_path}/chats.jsonl")
    lines = (tmp_path / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "ä"},
    ]
    conversation.command("/new")
    assert conversation.messages == []
    told.clear()
    conversation.command("/help")
    assert all(any(line.startswith(name) for line in told) for name in COMMANDS)
    assert not conversation.is_over
    conversation.command("/bye")
    assert conversation.is_over


def test_a_pipe_is_answered_line_by_line_by_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_LOG_FORMAT", "text")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    command = ["chat", EXAMPLE, "--temperature", "0", "--max-tokens=4"]
    ran = CliRunner().invoke(app, command, input="import \n\nimport \n")
    assert ran.exit_code == 0, ran.output
    half = len(ran.stdout) // 2
    assert ran.stdout[:half] == ran.stdout[half:] != ""
    assert "no chat template" in ran.stderr
    assert "empty line" not in ran.stderr  # which a pipe skips


def test_control_c_ends_a_chat_in_a_pipe(server: Server) -> None:
    server.step, server.answers = Semaphore(0), answering(said("part"), said("more"))
    command = [sys.executable, "-m", "kvasir", "chat", server.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        guard = Timer(TIMEOUT, process.kill)
        guard.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"first\nsecond\n")
        process.stdin.close()
        assert os.read(process.stdout.fileno(), 100) == b"part"
        process.send_signal(signal.SIGINT)
        server.step.release()  # a signal between Python's check and a read waits for the read
        process.wait()
        guard.cancel()
    assert (process.returncode, len(server.bodies)) == (130, 1)


class Typist:
    """`kvasir chat` in a terminal."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        pid, self.fd = pty.fork()
        if not pid:
            environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TERM": "xterm"}
            command = [sys.executable, "-m", "kvasir", "chat", *arguments]
            os.execve(sys.executable, command, environment)  # noqa: S606
        self.pid, self.unread = pid, b""

    def read_until(self, text: bytes) -> None:
        """Read on, from behind what was waited for last."""
        while text not in self.unread:
            try:
                self.unread += os.read(self.fd, 4096)
            except OSError:  # the end
                raise AssertionError(f"{text!r} did not come: {self.unread!r}") from None
        self.unread = self.unread.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


@contextmanager
def typing(cache: Path, *arguments: str) -> Iterator[Typist]:
    typist = Typist(cache, *arguments)
    guard = Timer(TIMEOUT, os.kill, (typist.pid, signal.SIGKILL))
    guard.start()
    try:
        yield typist
        with suppress(OSError):  # the end
            while os.read(typist.fd, 4096):
                pass
    finally:
        os.close(typist.fd)  # which ends what still runs
        _, status = os.waitpid(typist.pid, 0)
        guard.cancel()
    assert os.waitstatus_to_exitcode(status) == 0


def test_control_c_stops_an_answer_and_the_chat_goes_on(server: Server, tmp_path: Path) -> None:
    with typing(tmp_path, server.url) as typist:
        typist.read_until(b"> ")
        server.step = Semaphore(0)
        server.answers = answering(said("part", "\x1b[2J"), said("done"))
        typist.type("first\n")
        typist.read_until("␛[2J".encode())
        typist.type("\x03")
        server.step.release()  # likewise
        typist.read_until(b"(stopped)")
        typist.read_until(b"> ")
        server.step.release(100)
        typist.type("second\n")
        typist.read_until(b"done")
        typist.read_until(b"> ")
        typist.type("\x04")
        typist.read_until(b"next: ")
    assert [one["content"] for one in server.bodies[-1]["messages"]][::2] == ["first", "second"]
    assert (tmp_path / "kvasir/chat_history").read_text().splitlines() == ["first", "second"]
