"""kvasir explain: attention weights and the likeliest next tokens."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from typer import Option

from kvasir.commands.console.options import InputText, Json, ModelDirectory
from kvasir.commands.console.output import make_table, one_line_errors, show
from kvasir.commands.console.progress import ProgressBar

if TYPE_CHECKING:
    from kvasir.model.directory import ModelDirectory as Loaded
    from kvasir.server.engine.adapters.loaded import Adapter
    from kvasir.server.explain.explainer import Explainer
    from kvasir.server.explain.explanation import Explanation, Head


def _check_picture(out: Path | None) -> Path | None:
    if out is not None and out.suffix.lower() != ".png":
        raise typer.BadParameter(f"{str(out)!r} does not end in .png, the only format")
    return out


def _check_heads(heads: str | None) -> str | None:
    if heads is not None and not re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", heads):
        raise typer.BadParameter(f"{heads!r} is not a list of heads such as 1.0,2.3")
    return heads


def explain(
    directory: ModelDirectory,
    text: InputText,
    layer: int = Option(0, min=0, help="Layer whose attention, or memory, is shown."),
    head: int | None = Option(None, min=0, help="One of its heads. Default: all, side by side."),
    target: str | None = Option(None, help="The target of the text, for an encoder-decoder."),
    top_k: int = Option(10, min=1, help="Number of likeliest next tokens."),
    without: str | None = Option(
        None, callback=_check_heads, metavar="LAYER.HEAD,…", help="Heads to switch off: 1.0,2.3."
    ),
    adapter: Path | None = Option(
        None, help="Explain the model with an adapter: a folder of peft, or a run of train --lora."
    ),
    out: Path | None = Option(None, callback=_check_picture, help="Draw the weights: a PNG."),
    as_json: Json = False,
) -> None:
    """Show what the exported model attends to in a text, and a decoder's likeliest next tokens."""
    from kvasir.model.directory import load_model_dir
    from kvasir.server.explain.explanation import Head, Questions, check_head, check_index

    with one_line_errors(), ProgressBar(quiet=as_json) as progress:
        progress("loading the model", 0, 0)
        model_dir = load_model_dir(directory)
        if target is None and model_dir.config.encoder is not None:
            raise ValueError(f"{directory} is an encoder-decoder; give its text: --target")
        check_index("layer", layer, model_dir.config.n_layer)
        n_head = model_dir.config.heads_of(layer)
        if head is not None or (out is not None and not n_head):
            check_head(head or 0, layer, model_dir.config)
        named = without.split(",") if without else ()
        off = tuple(Head(*map(int, name.split("."))) for name in named)
        questions = Questions(top_k=top_k, without=off)
        explainer, loaded = _open(model_dir, adapter)
        explanation = explainer.explain(text, [layer], questions, target=target, adapter=loaded)
        heads = list(range(n_head)) if head is None else [head]
        if out is not None:
            from kvasir.commands.console.pictures import draw_attention

            progress(f"drawing {out.name}", 0, 0)
            draw_attention(explanation, model_dir, layer, heads, out)
    wrote = [] if out is None else [f"wrote {out}"]
    table = _table(explanation, model_dir.config.pooling is None, layer, heads, off)
    show(as_json, explanation.as_json(layer, heads), table, *wrote, then=("serve", directory))


def _open(model_dir: Loaded, adapter: Path | None) -> tuple[Explainer, Adapter | None]:
    """Return what explains a model, and its adapter, by the operators that would serve both."""
    from kvasir.server.explain.explainer import Explainer

    if adapter is None:
        return Explainer(model_dir), None
    from kvasir.model.directory import newest_checkpoint
    from kvasir.server.engine.adapters.stock import graph_adapters
    from kvasir.server.process.engine_builder import find_library, read_layout
    from kvasir.server.settings import load_settings

    library = find_library(load_settings(model=model_dir.path), model_dir)
    explainer = Explainer(model_dir, None, graph_adapters(read_layout(model_dir, library), library))
    folder = newest_checkpoint(adapter) or adapter
    assert explainer.adapters is not None
    return explainer, explainer.adapters.load(folder, folder.name, sys.maxsize)


def _table(
    explanation: Explanation, is_decoder: bool, layer: int, heads: list[int], off: tuple[Head, ...]
) -> Table:
    """Return a decoder's likeliest next tokens, or the tokens that an encoder attends most to."""
    tokens = explanation.tokens
    if (effect := explanation.effect) is not None:
        rows: list[tuple[str, ...]] = [
            (
                *(repr(token.text), str(token.token_id), f"{token.whole_probability:.1%}"),
                *(f"{token.probability:.1%}", f"{token.logit - token.whole_logit:+.2f}"),
            )
            for token in effect.tokens
        ]
        title = f"after {len(tokens):,} tokens, without {len(off)} heads"
        title += f": {effect.kl_divergence:.3f} bits from the whole model"
        columns: tuple[str, ...] = ("next token", "id", "whole", "without", "logit changes by")
    elif is_decoder:
        rows = [
            (repr(token.text), str(token.token_id), f"{token.probability:.1%}")
            for token in explanation.next_tokens
        ]
        title, columns = f"after {len(tokens):,} tokens", ("next token", "id", "probability")
    else:
        weights = explanation.weights[layer][heads].mean(axis=0)  # [n_tokens, n_tokens]
        rows = [
            (repr(token), repr(tokens[row.argmax()]), f"{row.max():.1%}")
            for token, row in zip(tokens, weights, strict=True)
        ]
        which = f"the mean of {len(heads)} heads" if heads[1:] else f"head {heads[0]}"
        title, columns = f"layer {layer}, {which}", ("token", "attends most to", "weight")
    return make_table(title, columns, rows)
