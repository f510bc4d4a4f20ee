"""kvasir generate: one completion, without a server."""

from __future__ import annotations

import secrets
from typing import Any

import typer
from typer import Option

from commands.console.options import InputText, Json, ModelDirectory, Temperature, TopK, TopP
from commands.console.output import one_line_errors, show
from commands.console.progress import ProgressBar


def generate(
    directory: ModelDirectory,
    prompt: InputText,
    max_tokens: int = Option(128, min=1, help="Maximum number of new tokens."),
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: int | None = Option(None, help="Of sampling. Default: a new one."),
    as_json: Json = False,
) -> None:
    """Continue a prompt in this process. Sampling defaults to what the model recommends."""
    from commands.console.terminal import complete
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
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **fields)
        engine = build_engine(load_settings(model=directory, max_num_seqs=1), bundle)
        prompt_ids = bundle.tokenizer.encode(prompt).ids
        check_length(len(prompt_ids), max_tokens, engine, len(bundle.config.target_prefix))
    pieces = []
    for piece in complete(engine, bundle, prompt_ids, params):
        pieces.append(piece)
        if not as_json:
            typer.echo(piece.text, nl=False)
    values = {
        "text": "".join(piece.text for piece in pieces),
        "finish_reason": pieces[-1].finish_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": [piece.token_id for piece in pieces if piece.token_id is not None],
        "seed": seed,
    }
    show(as_json, values, "")
