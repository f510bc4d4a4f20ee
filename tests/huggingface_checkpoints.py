"""Checkpoints as transformers saves them: a tiny random decoder of each family, and a tokenizer."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import nn

from model.tokenizer import train_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

TEXT = "\n".join(f"the {i}th line of a text that nobody needs to read twice" for i in range(60))
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
)
LENGTH = 96  # of a row
WINDOW = 12
_EMBEDDING = re.compile(r"\b(embed_\w+|wte|wpe)\.weight$")

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = _SHAPE | {"intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_MIXTURE = _GROUPED | {"tie_word_embeddings": False}
_GEMMA = _GROUPED | {"head_dim": 32}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# Name: architecture, configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _SHAPE),
    "gpt_neox": ("GPTNeoX", _SHAPE | {"intermediate_size": 96, "attention_dropout": 0.1}),
    "gpt_neox sequential": (
        "GPTNeoX",
        _SHAPE
        | {"intermediate_size": 96, "use_parallel_residual": False, "attention_bias": False}
        | _rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "opt": ("OPT", _SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": ("Llama", _GROUPED | {"tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        _GROUPED
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}
        | _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "yarn": (
        "Llama",
        _GROUPED
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=1.5, mscale=1.5),
    ),
    "yarn with two weights": (
        "Llama",
        _GROUPED
        | _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            truncate=False,
            mscale=1.5,
            mscale_all_dim=0.5,
        ),
    ),
    "smollm3": ("SmolLM3", _GROUPED | {"no_rope_layer_interval": 2}),
    "mistral": ("Mistral", _GROUPED | {"head_dim": 16, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _GROUPED | _QWEN),
    "qwen3": ("Qwen3", _GROUPED | {"head_dim": 32, "sliding_window": None}),
    "qwen3 with windows": (
        "Qwen3",
        _GROUPED
        | {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "phi3": ("Phi3", _GROUPED | {"sliding_window": WINDOW}),
    "phi3 partial": ("Phi3", _GROUPED | _rope("default", partial_rotary_factor=0.75)),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": (
        "Gemma2",
        _GEMMA
        | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
        | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 12.0},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _MIXTURE
        | {"moe_intermediate_size": 32, "mlp_only_layers": [0], "head_dim": 32}
        | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe with shares of all experts": (
        "Qwen3Moe",
        _MIXTURE | {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOss",
        _MIXTURE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32}
        | {"sliding_window": WINDOW}
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    ),
}


def make_model(name: str, **changes: Any) -> nn.Module:
    """Return a model with uneven weights, norms and biases, so that mistakes show in the logits.

    Embeddings are narrower: with wide ones, above all tied ones, a token would predict itself.
    """
    architecture, values = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**(values | changes))
    torch.manual_seed(0)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(architecture, f"{architecture}ForCausalLM")
    model: nn.Module = (
        getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.07 if _EMBEDDING.search(parameter_name) else 0.22)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
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
    options: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=make_tokenizer(), **(options | changes))
    tokenizer.save_pretrained(folder)


def save_checkpoint(folder: Path, model: nn.Module, **options: Any) -> Path:
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    save_tokenizer(folder)
    return folder
