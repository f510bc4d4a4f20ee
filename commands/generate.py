"""kvasir generate."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from commands.output import Json, check_text, fail, show
from commands.progress import ProgressBar


def generate(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    prompt: Annotated[str, typer.Argument(callback=check_text, help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the completion.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="0: the likeliest token.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Draw from so many; 0: from all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=1e-6, max=1.0, help="Draw from this share.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt here, without a server; sampled as the model advises."""
    from commands import terminal
    from model.bundle import BundleError, load_bundle
    from server.engine.sampling import SamplingParams
    from server.errors import KvasirError, StartupError
    from server.process.engine_builder import build_engine
    from server.settings import load_settings

    drawn = secrets.randbits(64) if seed is None else seed
    wanted = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    pieces = []
    try:
        with ProgressBar(quiet=as_json) as progress:
            progress("loading the model", 0, 0)
            bundle = load_bundle(directory)
            fields = bundle.generation.given() | {
                name: value for name, value in wanted.items() if value is not None
            }
            params = SamplingParams(max_tokens=max_tokens, seed=drawn, **fields)  # type: ignore[arg-type]
            engine = build_engine(load_settings(model=directory, max_num_seqs=1), bundle)
        prompt_ids = bundle.tokenizer.encode(prompt).ids
        for piece in terminal.generate(engine, bundle, prompt_ids, params):
            pieces.append(piece)
            if not as_json:
                typer.echo(piece.text, nl=False)
    except (BundleError, KvasirError, StartupError, ValueError) as error:
        fail(error)
    values = {
        "text": "".join(piece.text for piece in pieces),
        "finish_reason": pieces[-1].finish_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": [piece.token_id for piece in pieces if piece.token_id is not None],
        "seed": drawn,
    }
    show(as_json, values, "")
