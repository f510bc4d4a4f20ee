"""The decoder against Hugging Face transformers, which shares no line with it: same weights, same logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.config import DecoderConfig
from model.network.decoder import Decoder
from tests.random_models import make_config, make_decoder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )


def split_qkv(config: DecoderConfig, tensor: Tensor) -> list[Tensor]:
    return list(
        tensor.split(
            [n * config.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        )
    )


def llama_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Our parameters under Llama's names, which Qwen 2 shares."""
    ours = decoder.state_dict()
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["norm.weight"],
    }
    theirs["lm_head.weight"] = ours.get("head.weight", ours["embedding.weight"])
    for i in range(decoder.config.n_layer):
        to, block = f"model.layers.{i}", f"blocks.{i}"
        for kind in ("weight", "bias"):
            if f"{block}.attention.qkv.{kind}" in ours:
                parts = split_qkv(decoder.config, ours[f"{block}.attention.qkv.{kind}"])
                theirs |= {
                    f"{to}.self_attn.{x}_proj.{kind}": part
                    for x, part in zip("qkv", parts, strict=True)
                }
        theirs[f"{to}.self_attn.o_proj.weight"] = ours[f"{block}.attention.output.weight"]
        gate, up = ours[f"{block}.feed_forward.up.weight"].chunk(2)
        theirs |= {f"{to}.mlp.gate_proj.weight": gate, f"{to}.mlp.up_proj.weight": up}
        theirs[f"{to}.mlp.down_proj.weight"] = ours[f"{block}.feed_forward.down.weight"]
        theirs[f"{to}.input_layernorm.weight"] = ours[f"{block}.attention_norm.weight"]
        theirs[f"{to}.post_attention_layernorm.weight"] = ours[f"{block}.feed_forward_norm.weight"]
    return theirs


def gpt2_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Our parameters under GPT-2's names, whose linear layers are transposed."""
    ours = decoder.state_dict()
    theirs = {
        "transformer.wte.weight": ours["embedding.weight"],
        "lm_head.weight": ours["embedding.weight"],
    }
    theirs["transformer.wpe.weight"] = ours["position_embedding.weight"]
    names = {"attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj"}
    names |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
    norms = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = ours[f"norm.{kind}"]
        for i in range(decoder.config.n_layer):
            for name, other in (names | norms).items():
                theirs[f"transformer.h.{i}.{other}.{kind}"] = ours[f"blocks.{i}.{name}.{kind}"].t()
    return theirs


def logits_of(model: nn.Module, weights: dict[str, Tensor], input_ids: Tensor) -> Tensor:
    model.load_state_dict(weights)
    model.eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids).logits
    return logits


def llama_shape(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_embeddings,
    }


@pytest.mark.parametrize("family", ["llama", "llama untied", "qwen2", "gpt2"])
def test_the_decoder_computes_what_the_published_one_does(family: str) -> None:
    biases = {"qkv_bias": True, "output_bias": True, "feed_forward_bias": True}
    shape: dict[str, Any] = {
        "head_dim": 16,
        "d_model": 64,
    }  # some families derive one from the other
    if family == "gpt2":
        gpt2 = {
            "position": "learned",
            "norm": "layernorm",
            "feed_forward": "gelu",
            "n_kv_head": 4,
            **biases,
        }
        config = make_config(**shape, **gpt2)
    else:
        config = make_config(
            **shape,
            qkv_bias=family == "qwen2",
            tied_embeddings="untied" not in family,
            rope_theta=5e5,
        )
    decoder = make_decoder(config)
    input_ids = torch.randint(config.vocab_size, (2, config.max_model_len))
    model: nn.Module
    if family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.max_model_len,
                n_embd=config.d_model,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_inner=config.d_ff,
                activation_function="gelu",
                layer_norm_epsilon=config.norm_eps,
            )
        )
        theirs = logits_of(model, gpt2_weights(decoder), input_ids)
    elif family == "qwen2":
        theirs = logits_of(
            Qwen2ForCausalLM(Qwen2Config(**llama_shape(config))), llama_weights(decoder), input_ids
        )
    else:
        theirs = logits_of(
            LlamaForCausalLM(LlamaConfig(**llama_shape(config))), llama_weights(decoder), input_ids
        )
    with torch.inference_mode():
        ours = decoder(input_ids)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()
