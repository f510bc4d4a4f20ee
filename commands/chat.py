"""kvasir chat: a conversation on a terminal, with a model directory or with any server."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import typer
from rich.console import Console
from typer import Argument, Option

from kvasir.commands.console.chat_client import ChatClient, ChatError, Delta
from kvasir.commands.console.conversation import Conversation
from kvasir.commands.console.options import CacheDir, Temperature, TopP
from kvasir.commands.console.output import console, fail, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.commands.pull import served_directory
from kvasir.model.platform.printable import printable
from kvasir.server.process.local_server import serve_locally
from kvasir.server.settings import user_cache

_HISTORY_LINES = 1000


def chat(
    server: str = Argument(
        help="A model directory or reference, or an OpenAI-compatible server's URL."
    ),
    model: str | None = Option(None, help="Model id to ask for. Default: the server's first."),
    system: str | None = Option(None, help="System message."),
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: int | None = Option(None, min=1, help="Of an answer. Default: the server's."),
    api_key: str | None = Option(None, envvar="KVASIR_API_KEY", help="Sent to the server."),
    timeout: float = Option(300.0, min=0.001, help="Seconds to wait for the next token."),
    cache_dir: CacheDir = None,
) -> None:
    """Chat on the terminal; in a pipe, answer each line.

    A model without a chat template continues each text. Starts a server for a directory, and stops
    it at the end.
    """
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    fields = {name: value for name, value in options.items() if value is not None}
    is_interactive, is_url = sys.stdin.isatty(), server.startswith(("http://", "https://"))
    screen, aside = console(), console(stderr=not is_interactive)
    serving = nullcontext(server) if is_url else _served(server, cache_dir)
    with one_line_errors(), serving as url:
        client = ChatClient(
            url, model=model, api_key=api_key, timeout=timeout, through_proxy=is_url
        )
        conversation = Conversation(
            client, lambda line: aside.print(line, style="dim"), fields, system, is_interactive
        )
        if is_interactive:
            conversation.notify(f"{client.model}: /help lists commands, Ctrl-D ends the chat")
        for entered in _lines(screen):
            line = conversation.command(entered) if entered.startswith("/") else entered
            if conversation.is_over:
                break
            if line is None:
                continue
            try:
                _print_answer(screen, conversation.answer(line))
            except ChatError as error:
                if not is_interactive:
                    fail(error)
                typer.echo(f"kvasir: {error}", err=True)
    if is_interactive:
        show(False, {}, then=("bench", "serve", server) if is_url else ("serve", server))


@contextmanager
def _served(server: str, cache_dir: Path | None) -> Iterator[str]:
    """Serve a directory or a reference; Ctrl-C stops an answer, not the server."""
    directory = served_directory(Path(server), None, cache_dir)
    with ExitStack() as serving:
        with ProgressBar() as progress:
            progress("loading the model", 0, 0)
            url = serving.enter_context(serve_locally(directory, "--max-num-seqs", "1"))
        yield url


def _lines(screen: Console) -> Iterator[str]:
    """Yield what the user enters; at a terminal with a history of earlier chats."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    with _history():
        entered = ""
        while True:
            try:
                entered += input("… " if entered else "> ")
            except EOFError:
                screen.print()
                return
            except KeyboardInterrupt:
                screen.print("(Ctrl-D ends the chat)", style="dim")
                entered = ""
                continue
            if entered.endswith("\\"):
                entered = entered[:-1] + "\n"
                continue
            yield entered
            entered = ""


@contextmanager
def _history() -> Iterator[None]:
    try:
        import readline  # with it, input() edits lines
    except ImportError:  # some builds of Python lack it
        yield
        return
    path = user_cache() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def _print_answer(screen: Console, answer: Generator[Delta]) -> None:
    """Print an answer as it comes, the reasoning dim; Ctrl-C stops it, or in a pipe the command."""
    has_begun = False
    try:
        for delta in answer:
            has_begun = True
            text = printable(delta.text) if screen.is_terminal else delta.text
            if delta.is_reasoning:
                screen.print(text, style="dim", end="", soft_wrap=True)
            else:
                typer.echo(text, nl=False)
    except KeyboardInterrupt:
        answer.close()
        if not sys.stdin.isatty():
            raise
        screen.print(" (stopped)", style="dim", end="")
    if has_begun:
        screen.print()
