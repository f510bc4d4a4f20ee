"""Checkpoints as transformers saves them: a tiny random decoder of each family, and a tokenizer."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor, nn

from kvasir.model.tokenizer import train_tokenizer

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
_EMBEDDING = r"\b(embed_\w+|wte|wpe)\.weight$"

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


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _rope_by_layer_type(**kinds: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": kinds}


_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}

# Name: architecture, configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _SHAPE),
    "gpt_neox": ("GPTNeoX", _SHAPE | {"intermediate_size": 96, "attention_dropout": 0.1}),
    "gpt_neox sequential": (
        "GPTNeoX",
        _SHAPE
        | {"intermediate_size": 96, "use_parallel_residual": False, "attention_bias": False}
        | rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "opt": ("OPT", _SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": ("Llama", _GROUPED | {"tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        _GROUPED
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}
        | rope(
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
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=1.5, mscale=1.5),
    ),
    "yarn with two weights": (
        "Llama",
        _GROUPED
        | rope(
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
    "phi3 partial": ("Phi3", _GROUPED | rope("default", partial_rotary_factor=0.75)),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": (
        "Gemma2",
        _GEMMA
        | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
        | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 12.0},
    ),
    "gemma3": (
        "Gemma3Text",
        _GEMMA
        | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | _rope_by_layer_type(
            full_attention={"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            sliding_attention={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "longrope": (
        "Phi3",
        _GROUPED
        | {"original_max_position_embeddings": 16}
        | rope(
            "longrope",
            short_factor=[1.0 + i / 8 for i in range(6)],
            long_factor=[2.0 + i for i in range(6)],
            partial_rotary_factor=0.75,
        ),
    ),
    "granite": (
        "Granite",
        _GROUPED
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.7, "logits_scaling": 4.0, "attention_bias": True},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        _GROUPED
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 4.0}
        | {"residual_multiplier": 0.7, "num_local_experts": 0, "shared_intermediate_size": 96}
        | {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
    ),
    "olmo2": ("Olmo2", _GROUPED),
    "olmo3": (
        "Olmo3",
        _GROUPED
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | _rope_by_layer_type(
            full_attention={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
            | {"original_max_position_embeddings": 24},
            sliding_attention={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "phi": ("Phi", _GROUPED | rope("default", partial_rotary_factor=0.5)),
    "stablelm": (
        "StableLm",
        _GROUPED | {"use_qkv_bias": True} | rope("default", partial_rotary_factor=0.25),
    ),
    "stablelm parallel": (
        "StableLm",
        _GROUPED | {"use_parallel_residual": True} | rope("default", partial_rotary_factor=0.25),
    ),
    "starcoder2": ("Starcoder2", _GROUPED | {"sliding_window": WINDOW}),
    "ministral": (
        "Ministral",
        _GROUPED
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (
        "Ministral3",
        _GROUPED
        | {"head_dim": 32}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=24,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "falcon": ("Falcon", _SHAPE),
    "falcon with groups": (
        "Falcon",
        _SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon with one norm": (
        "Falcon",
        _SHAPE
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
        | {"bias": True},
    ),
    "bloom": ("Bloom", _SHAPE),
    "gptj": ("GPTJ", _SHAPE | {"rotary_dim": 8}),
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
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            truncate=False,
            beta_slow=2.0,
            attention_factor=1.5,
        ),
    ),
}


def make_model(name: str, **changes: Any) -> nn.Module:
    """Return a model with uneven weights, norms and biases, so that mistakes show in the logits.

    Embeddings are narrower: with wide ones, above all tied ones, a token would predict itself, and
    so it would with Gemma 3's, which are multiplied, and BLOOM's, which are normalised.
    """
    architecture, values = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**(values | changes))
    torch.manual_seed(0)
    kind = _CLASSES.get(architecture, f"{architecture}ForCausalLM")
    model: nn.Module = (
        getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    )
    narrow = 0.02 if architecture == "Gemma3Text" else 0.07
    make_uneven(model, _EMBEDDING, narrow_width=narrow, width=0.22)
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
