"""Checkpoints as transformers saves them: a tiny random decoder of each family, and a tokenizer."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor, nn

from kvasir.model.tokenizer import train_tokenizer
from tests.kit.families import FAMILIES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

TEXT = "\n".join(f"the {i}th line of a text that nobody needs to read twice" for i in range(60))
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
)
_EMBEDDING = r"\b(embed_\w+|wte|wpe|tokens_embed)\.weight$"


def make_model(name: str, **changes: Any) -> nn.Module:
    """Return a model with uneven weights, norms and biases, so that mistakes show in the logits.

    Embeddings are narrower: with wide ones, above all tied ones, a token would predict itself, and
    so it would with Gemma 3's, which are multiplied, and BLOOM's, which are normalised.
    """
    kind, values = FAMILIES[name]
    return make_uneven_model(kind, values | changes, width=0.22)


def make_uneven_model(kind: str, values: dict[str, Any], width: float) -> nn.Module:
    """Return a model of a type. width: the deviation of matrices."""
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM
    model: nn.Module = make.from_config(config, attn_implementation="eager").eval()
    narrow = 0.02 if kind.startswith("gemma3") else 0.07
    make_uneven(model, _EMBEDDING, narrow_width=narrow, width=width)
    return model


@cache
def make_tokenizer() -> Tokenizer:
    """Byte-level BPE that puts BOS before every text, as Llama's and Gemma's do."""
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.add_special_tokens([BOS, EOS])
    first = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, first)]
    )
    return tokenizer


def save_tokenizer(folder: Path, **changes: Any) -> None:
    for name, content in _tokenizer_files(tuple(sorted(changes.items()))).items():
        (folder / name).write_bytes(content)


@cache
def _tokenizer_files(changes: tuple[tuple[str, Any], ...]) -> dict[str, bytes]:
    """Return what transformers writes, which takes as long as a small model."""
    options: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    make: Any = transformers.PreTrainedTokenizerFast
    with TemporaryDirectory() as folder:
        make(tokenizer_object=make_tokenizer(), **options | dict(changes)).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_checkpoint(folder: Path, model: nn.Module, **options: Any) -> Path:
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    save_tokenizer(folder)
    return folder


def set_values(folder: Path, file: str, **values: object) -> None:
    """Change values of a checkpoint's file, or make it."""
    path = folder / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | values))


def set_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint in one file."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def make_uneven(
    model: nn.Module, narrow: str = "(?!)", width: float = 0.2, narrow_width: float = 0.07
) -> None:
    """Give a model uneven weights, norms and biases, so that mistakes show in the logits.

    narrow: a pattern of names, of embeddings by which a token would predict itself.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.requires_grad:  # sinusoids are computed
                parameter.normal_(std=narrow_width if re.search(narrow, name) else width)
            if "embeddings_layernorm" in name:
                parameter.mul_(0.1)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Compare logits, vectors or scores of two networks in float32."""
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()
