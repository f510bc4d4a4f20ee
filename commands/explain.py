"""kvasir explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from commands.output import Json, check_text, fail, show
from commands.progress import ProgressBar

if TYPE_CHECKING:
    from server.explain import Explanation


def _check_picture(out: Path | None) -> Path | None:
    if out is not None and out.suffix.lower() != ".png":
        raise typer.BadParameter(f"{str(out)!r} does not end in .png, which is what can be drawn")
    return out


def explain(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    text: Annotated[str, typer.Argument(callback=check_text, help="What the model is to read.")],
    layer: Annotated[int, typer.Option(min=0, help="Which layer's attention.")] = 0,
    head: Annotated[
        int | None, typer.Option(min=0, help="Which of its heads. Default: all, side by side.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many of the likeliest next tokens.")] = 10,
    out: Annotated[
        Path | None, typer.Option(callback=_check_picture, help="Draw the weights: a PNG.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the exported model attends to in a text, and what it would say next."""
    from model.bundle import BundleError, load_bundle
    from server.errors import KvasirError
    from server.explain import Explainer, check_index

    try:
        with ProgressBar(quiet=as_json) as progress:
            progress("loading the model", 0, 0)
            bundle = load_bundle(directory)
            if head is not None:
                check_index("head", head, bundle.config.n_head)
            explanation = Explainer(bundle).explain(text, [layer], top_k=top_k)
            heads = list(range(bundle.config.n_head)) if head is None else [head]
            if out is not None:
                from commands.heatmap import draw_attention

                progress(f"drawing {out.name}", 0, 0)
                draw_attention(
                    explanation, directory.name, layer, heads, out, bundle.config.window_of(layer)
                )
    except (BundleError, KvasirError, OSError) as error:
        fail(error)
    show(as_json, explanation.as_json(layer, heads), _next_tokens(explanation))


def _next_tokens(explanation: Explanation) -> Table:
    table = Table(title=f"after {len(explanation.tokens):,} tokens")
    table.add_column("next token")
    table.add_column("id", justify="right")
    table.add_column("probability", justify="right")
    for token in explanation.next_tokens:
        table.add_row(Text(repr(token.text)), str(token.token_id), f"{token.probability:.1%}")
    return table
