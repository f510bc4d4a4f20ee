"""kvasir generate: one completion, without a server."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import typer
from typer import Option

from commands.console.options import InputText, Json, ModelDirectory, Temperature, TopK, TopP
from commands.console.output import console, one_line_errors, show
from commands.console.progress import ProgressBar
from model.harmless import harmless

_NEW_TOKENS = 128  # by default, if as many fit


def generate(
    directory: ModelDirectory,
    prompt: InputText,
    max_tokens: int | None = Option(
        None, min=1, help=f"New tokens. Default: {_NEW_TOKENS}, or as many as fit."
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
    from commands.console.terminal import complete, legend, shaded
    from model.bundle import GenerationDefaults, load_bundle
    from server.engine.sampling import SamplingParams
    from server.process.engine_builder import build_engine
    from server.requests.admission.queue import check_length
    from server.settings import load_settings

    seed = secrets.randbits(64) if seed is None else seed
    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        progress("loading the model", 0, 0)
        bundle = load_bundle(directory)
        given = GenerationDefaults(temperature=temperature, top_k=top_k, top_p=top_p).given()
        fields: dict[str, Any] = bundle.default_sampling.given() | given
        engine = build_engine(load_settings(model=directory, max_num_seqs=1), bundle)
        prompt_ids = bundle.tokenizer.encode(prompt).ids
        n_prompt, n_given = len(prompt_ids), len(bundle.config.target_prefix)
        if max_tokens is None:
            max_tokens = max(1, min(_NEW_TOKENS, engine.limits.after(n_prompt) - n_given))
        check_length(n_prompt, max_tokens, engine, n_given)
        logprobs = 0 if show_probabilities else None
        params = SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs, **fields)
    pieces = []
    is_terminal = sys.stdout.isatty()
    for piece in complete(engine, bundle, prompt_ids, params):
        pieces.append(piece)
        if as_json:
            continue
        if not show_probabilities:
            typer.echo(harmless(piece.text) if is_terminal else piece.text, nl=False)
        elif is_terminal:
            console().print(shaded(piece), end="", soft_wrap=True)
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
        parts = ["", legend()] if show_probabilities else [""]
        show(as_json, values, *parts, then=("serve", directory))
