"""kvasir generate and kvasir embed: one completion, or vectors of texts, without a server."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import typer
from rich.style import Style
from rich.text import Text
from typer import Argument, Option

from kvasir.commands.console.options import (
    InputText,
    Json,
    ModelDirectory,
    Temperature,
    TopK,
    TopP,
    check_texts,
)
from kvasir.commands.console.output import console, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar
from kvasir.model.platform.printable import printable

# The page's shades: least probabilities, and the colours of text and background.
_SHADES = (
    (0.9, ""),
    (0.5, "black on #fdf1d3"),
    (0.2, "black on #fbdfa6"),
    (0.05, "black on #f8c48c"),
    (0.0, "black on #f3a287"),
)
_FEW_NUMBERS = 4  # of a vector, at a terminal


def generate(
    directory: ModelDirectory,
    prompt: InputText,
    max_tokens: int | None = Option(
        None, min=1, help="New tokens. Default: 128, or as many as fit."
    ),
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: int | None = Option(None, help="Of sampling. Default: a new one."),
    show_probabilities: bool = Option(
        False, "--show-probabilities", help="Shade tokens by probability; in a pipe, list them."
    ),
    as_json: Json = False,
) -> None:
    """Continue a prompt in this process. Sampling defaults to what the model recommends."""
    from kvasir.model.records import GenerationDefaults
    from kvasir.server.process.library import Model

    seed = secrets.randbits(64) if seed is None else seed
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        progress("loading the model", 0, 0)
        model = Model(directory)
        given = GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p)
        logprobs = 0 if show_probabilities else None
        prompt_ids, params = model.plan(
            prompt, given, max_tokens=max_tokens, seed=seed, logprobs=logprobs
        )
    pieces = []
    is_terminal = sys.stdout.isatty()
    for piece in model.pieces(prompt_ids, params):
        pieces.append(piece)
        if as_json:
            continue
        if not show_probabilities:
            typer.echo(printable(piece.text) if is_terminal else piece.text, nl=False)
        elif is_terminal:
            console().print(_shaded(piece.text, piece.probability), end="", soft_wrap=True)
        elif piece.probability is not None:
            typer.echo(f"{piece.probability:6.1%}  {piece.text!r}")
    tokens = [piece for piece in pieces if piece.token_id is not None]
    values: dict[str, Any] = {
        "text": "".join(piece.text for piece in pieces),
        "finish_reason": pieces[-1].finish_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": [piece.token_id for piece in tokens],
        "seed": seed,
    }
    if show_probabilities:
        keys = ("text", "id", "probability")
        rows = ((piece.text, piece.token_id, piece.probability) for piece in tokens)
        values["tokens"] = [dict(zip(keys, row, strict=True)) for row in rows]
    if as_json or is_terminal or not show_probabilities:
        shades = [(f" ≥ {least:.0%} " if least else " less ", style) for least, style in _SHADES]
        legend = Text.assemble("probability ", *shades)
        parts = ["", legend] if show_probabilities else [""]
        show(as_json, values, *parts, then=("serve", directory))


def embed(
    directory: ModelDirectory,
    texts: list[str] = Argument(callback=check_texts, help="Texts, each of which gets a vector."),
    prompt_name: str | None = Option(
        None, "--prompt-name", help="The model's prompt before each. Default: the model's choice."
    ),
    as_json: Json = False,
) -> None:
    """Make vectors of texts in this process, as /v1/embeddings does; in a pipe, one a line."""
    from kvasir.server.process.library import Model

    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        progress("loading the model", 0, 0)
        vectors = Model(directory).embed(texts, prompt_name=prompt_name).tolist()
    if as_json or not sys.stdout.isatty():
        lines = [json.dumps(vector) for vector in vectors]
        show(as_json, {"vectors": vectors}, *map(Text, lines))
        return
    for text, vector in zip(texts, vectors, strict=True):
        begin = ", ".join(f"{number:.4f}" for number in vector[:_FEW_NUMBERS])
        typer.echo(f"[{begin}, …] {len(vector)} numbers of {printable(text, one_line=True)[:60]}")
    show(False, {}, then=("serve", directory))


def _shaded(text: str, probability: float | None) -> Text:
    """Return a text on the shade of its token's probability, if that is known."""
    shown = 1.0 if probability is None else probability
    style = next(style for least, style in _SHADES if shown >= least)
    return Text(printable(text), Style.parse(style))
