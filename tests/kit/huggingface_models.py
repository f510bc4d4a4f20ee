"""Encoders and encoder-decoders as transformers saves them: tiny, random, of each family."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests.kit.huggingface_checkpoints import EOS, make_uneven, save_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

VOCABULARY = 320
_T5: dict[str, Any] = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_heads": 4}
_T5 |= {"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 12}
_T5 |= {"relative_attention_max_distance": 20, "n_positions": 64}
_BART: dict[str, Any] = {"d_model": 64, "max_position_embeddings": 64}
_BART |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
_BART |= {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 80}

# Name: class, configuration.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5 1.1": (
        "T5ForConditionalGeneration",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-silu"}),
    "bart": ("BartForConditionalGeneration", _BART | {"forced_bos_token_id": 5}),
    "mbart": ("MBartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "marian": ("MarianMTModel", _BART | {"scale_embedding": True, "activation_function": "swish"}),
    "m2m_100": ("M2M100ForConditionalGeneration", _BART),
    "pegasus": ("PegasusForConditionalGeneration", _BART | {"scale_embedding": True}),
}


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 16}

# Name: architecture, configuration.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SHAPE),
    "bert with another activation": ("Bert", _SHAPE | {"hidden_act": "gelu_new"}),
    "distilbert": ("DistilBert", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "roberta": ("Roberta", _SHAPE | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", _SHAPE),
    "mpnet": ("MPNet", _SHAPE),
    "modernbert": ("ModernBert", _SHAPE | {"local_attention": 12, "classifier_pooling": "mean"}),
    "modernbert with biases": (
        "ModernBert",
        _SHAPE
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 9}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "nomic_bert": ("NomicBert", _SHAPE),
    "qwen3": ("Qwen3", _GROUPED),
    "embedding gemma": (
        "Gemma3Text",
        _GROUPED
        | {"use_bidirectional_attention": True, "sliding_window": 10, "query_pre_attn_scalar": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id"))


def make_encoder(name: str, kind: str = "Model", **changes: Any) -> Any:
    """Return a model with uneven weights, norms and biases, so that mistakes show."""
    architecture, values = ENCODERS[name]
    values = _TOKENS | {"vocab_size": VOCABULARY, "max_position_embeddings": 64} | values | changes
    config = getattr(transformers, f"{architecture}Config")(**values, pad_token_id=1)
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}{kind}")
    model = model._from_config(config, attn_implementation="eager").eval()
    make_uneven(model)
    return model


def make_encoder_decoder(name: str, **changes: Any) -> Any:
    """Return such a model, whose embeddings are narrower."""
    architecture, values = ENCODER_DECODERS[name]
    kind = getattr(transformers, architecture)
    tokens = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = kind.config_class(vocab_size=VOCABULARY, **{**tokens, **values, **changes})
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    make_uneven(model, narrow="shared")
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


def save(folder: Path, model: Any, **of_tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder, chat_template=None, pad_token=EOS, **of_tokenizer)
    return folder
