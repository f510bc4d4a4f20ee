"""GGUF files of models of transformers, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.kit.huggingface_checkpoints import BOS, CHAT_TEMPLATE, EOS, make_tokenizer

Array = NDArray[Any]
ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi": gguf.MODEL_ARCH.PHI2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
# Architectures whose norms llama.cpp finds by the key of layer norms.
_LAYER_NORMS = ("cohere", "cohere2", "nemotron", "olmo", "phi", "stablelm", "starcoder2")
_PERMUTED = (
    *("llama", "mistral", "mixtral", "smollm3", "arcee", "olmo"),
    *("granite", "granitemoe", "granitemoeshared"),
)


def write_gguf(
    path: Path,
    model: nn.Module,
    kind: Kind = Kind.F32,
    split_max_tensors: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    **values: Any,
) -> Path:
    """Write a model, and the tests' tokenizer, with its matrices in a type of ggml.

    values: further keys of the metadata, or other values, with `__` for a dot.
    """
    config: Any = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(
        path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors
    )
    _write_config(writer, config)
    write_tokenizer(writer, make_tokenizer(), "llama-bpe", config.vocab_size)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, value in values.items():
        key = name.replace("__", ".")
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in _converted(model):
        array = tensor.detach().float().numpy()
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        theirs += ".weight" if theirs.endswith("attn_sinks") else ""
        if array.ndim == 1 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(theirs, array)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
    if (factors := _llama3_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    heads, kind = config.num_attention_heads, config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = 4 * config.hidden_size if kind == "gpt2" else config.intermediate_size
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if kind.startswith("lfm2"):
        n = config.num_key_value_heads
        writer.add_head_count_kv([n * (layer != "conv") for layer in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif hasattr(config, "rms_norm_eps") and kind not in _LAYER_NORMS:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        named = {"gpt2": "layer_norm_epsilon", "starcoder2": "norm_epsilon"}
        named |= {"nemotron": "norm_eps", "olmo": "rms_norm_eps"}
        writer.add_layer_norm_eps(getattr(config, named.get(kind, "layer_norm_eps")))
    if getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(turned)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    _write_own(writer, config)
    _write_experts(writer, config)


def _write_own(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the keys of single architectures."""
    kind = config.model_type
    if kind.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("alpha"):
        turned = config.head_dim
        writer.kv_data[0].pop(f"{writer.arch}.rope.freq_base")
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (turned / (turned - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        stretch = config.max_position_embeddings / config.original_max_position_embeddings
        ratio = np.log(stretch) / np.log(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + ratio)))
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if kind == "olmo3":
        factor = 0.1 * np.log(rope["full_attention"]["factor"]) + 1.0  # of attention
        writer.add_rope_scaling_attn_factors(float(factor))
    if kind in ("gemma3_text", "olmo3") or (kind == "exaone4" and config.sliding_window):
        writer.add_sliding_window_pattern(
            [layer == "sliding_attention" for layer in config.layer_types]
        )
    windowed = ("phi3", "gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "gpt_oss")
    if kind in windowed:
        writer.add_sliding_window(config.sliding_window or 0)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the keys of architectures with experts, by those of config.json that there are."""
    named = {
        ("num_local_experts", "num_experts", "n_routed_experts"): writer.add_expert_count,
        ("num_experts_per_tok", "moe_topk"): writer.add_expert_used_count,
        ("moe_intermediate_size",): writer.add_expert_feed_forward_length,
        ("shared_expert_intermediate_size", "shared_intermediate_size"): (
            writer.add_expert_shared_feed_forward_length
        ),
        ("n_shared_experts",): writer.add_expert_shared_count,
        ("first_k_dense_replace", "num_dense_layers"): writer.add_leading_dense_block_count,
        ("routed_scaling_factor",): writer.add_expert_weights_scale,
        ("n_group",): writer.add_expert_group_count,
        ("topk_group",): writer.add_expert_group_used_count,
    }
    for names, write in named.items():
        values = [
            getattr(config, name) for name in names if getattr(config, name, None) is not None
        ]
        if values:
            write(values[0])
    if config.model_type in ("glm4_moe", "dots1", "minimax_m2", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("glm4_moe", "dots1"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type in ("hunyuan_v1_moe", "minimax_m2", "gpt_oss"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)


def write_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str, n_tokens: int = 0
) -> None:
    """Write a byte-level tokenizer, and more tokens for rows of the embedding that it has not."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = tokenizer.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    control, normal, unused = (getattr(gguf.TokenType, k) for k in ("CONTROL", "NORMAL", "UNUSED"))
    types = [control if i in special else normal for i in range(len(tokens))]
    further = range(len(tokens), n_tokens)
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in further)])
    writer.add_token_types([*types, *(unused for _ in further)])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocabulary[BOS])
    writer.add_eos_token_id(vocabulary[EOS])


def _converted(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model, changed as by convert_hf_to_gguf.py."""
    config: Any = model.config
    kind, heads = config.model_type, config.num_attention_heads
    tied = config.tie_word_embeddings
    for name, given in model.state_dict().items():
        tensor = given
        if name == "lm_head.weight" and tied:
            continue
        if kind in _PERMUTED and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else config.num_key_value_heads
            halves = tensor.unflatten(0, (n, 2, -1))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        if kind in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        if kind == "gpt2" and name.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight", "c_proj.weight")
        ):
            tensor = tensor.t()
        if kind == "gpt_neox" and "query_key_value" in name:
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if name.endswith("conv.conv.weight"):
            tensor = tensor[:, 0]
        if kind == "nemotron" and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        yield from _of_experts(kind, name, tensor)


def _of_experts(kind: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or those of gates and of what they gate, with the names of a checkpoint."""
    end = ".bias" if name.endswith("bias") else ".weight"
    stem = name.removesuffix("_bias").replace("block_sparse_moe.experts", "mlp.experts")
    if kind == "gpt_oss" and "mlp.experts." in name and end == ".weight":
        tensor = tensor.transpose(1, 2)
    if stem.endswith("experts.gate_up_proj"):
        halves = (tensor[:, ::2], tensor[:, 1::2]) if kind == "gpt_oss" else tensor.chunk(2, dim=1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield stem.replace("gate_up", part) + end, half.contiguous()
    elif stem.endswith("experts.down_proj"):
        yield stem + end, tensor.contiguous()
    elif name.endswith("shared_mlp.input_linear.weight"):  # Granite's
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("shared_mlp.input_linear", f"mlp.shared_expert.{part}_proj"), half
    else:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
        if kind.startswith("granite"):
            name = name.replace(".router.weight", ".router.layer.weight")
            name = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
        yield name, tensor.contiguous()


def _llama3_factors(config: Any) -> Array | None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.head_dim
    result = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        original = rope["original_max_position_embeddings"]
        low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
        if wavelength < high:
            result.append(1.0)
        elif wavelength > low:
            result.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            result.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(result, dtype=np.float32)
