"""The published decoders after GPT-2: GPT-Neo, GPT-NeoX, GPT-J and others, as in `decoders.py`."""

from __future__ import annotations

from typing import Any

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas.traits import ALL_BIASES, ROPE
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.heads import in_blocks, interleaved_by_head, pairs_apart
from kvasir.model.importing.tensors import Source, in_layers, stacked, transposed

_GPT = {"hidden_act": "gelu_new", "rms_norm_eps": 1e-5}
_GPT_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}


def _gptj_rotary_dim(options: Options) -> int | None:
    turned = options.whole("rotary_dim")
    head_dim = options.whole("hidden_size") // options.whole("num_attention_heads")
    return None if turned == head_dim else turned


def always_four_times(options: Options) -> int:
    """Return the width of feed-forwards that are four times as wide as the model."""
    return 4 * options.whole("hidden_size")


def four_times(options: Options) -> Any:
    """Return the width of feed-forwards; null is four times the model's."""
    inner = options["intermediate_size"]
    return always_four_times(options) if inner is None else inner


def _gpt_neo_windows(options: Options) -> list[int]:
    kinds = list[Any]()
    given = options["attention_types"] or [[["global", "local"], 12]]
    for pair in given if isinstance(given, list) else [given]:
        if not isinstance(pair, list) or list(map(type, pair)) != [list, int]:
            raise refuse("attention_types", pair, "pairs of kinds of layers and a number")
        kinds += pair[0] * min(pair[1], options.whole("num_hidden_layers"))
    if len(kinds) != options.whole("num_hidden_layers"):
        raise refuse("attention_types", options["attention_types"], "one for each layer")
    return [layer for layer, kind in enumerate(kinds) if kind == "local"]


# fmt: off
_GPT2_FIELDS = ALL_BIASES | {
    "position": "learned", "norm": "layernorm", "d_ff": four_times,
    "attention_scale": lambda options: None if options["scale_attn_weights"] else 1.0}
_GPT2_MODULES = {
    "embedding": "wte", "position_embedding": "wpe", "norm": "ln_f", "head": "lm_head",
} | in_layers(
    "h.*.", attention_norm="ln_1", feed_forward_norm="ln_2",
    qkv=transposed("attn.c_attn"), output=transposed("attn.c_proj"),
    up=transposed("mlp.c_fc"), down=transposed("mlp.c_proj"))
_NEOX_MODULES = {
    "embedding": "embed_in", "norm": "final_layer_norm", "head": "lm_head",
} | in_layers(
    "layers.*.", attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm",
    qkv=interleaved_by_head("attention.query_key_value"), output="attention.dense",
    up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
_GPTJ_FIELDS = {"norm": "layernorm", "parallel_residual": True, "feed_forward_bias": True,
                "head_bias": True, "d_ff": four_times, "rotary_dim": _gptj_rotary_dim}
_GPTJ_MODULES = {"embedding": "wte", "norm": "ln_f", "head": "lm_head"} | in_layers(
    "h.*.", attention_norm="ln_1", feed_forward_norm="ln_1",
    qkv=pairs_apart(stacked(*(f"attn.{part}_proj" for part in "qkv"))),
    output="attn.out_proj", up="mlp.fc_in", down="mlp.fc_out")
GPTS: dict[str, Family] = {
    "gpt2": Family(
        architectures=("GPT2LMHeadModel", "GPT2Model"),
        shape=(50257, 768, None, 12, 12, None, 1024), tokens=(50256, 50256),
        defaults=_GPT | {"scale_attn_weights": True, "tie_word_embeddings": True},
        names=_GPT_NAMES, only={"scale_attn_by_inverse_layer_idx": (False,)},
        fields=_GPT2_FIELDS, gated=False, prefixes=("transformer.",), modules=_GPT2_MODULES,
    ),
    "gpt_neox": Family(
        architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
        shape=(50432, 6144, 24576, 44, 64, None, 2048), tokens=(0, 2),
        defaults=ROPE | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True,
                         "use_parallel_residual": True, "partial_rotary_factor": 0.25,
                         "tie_word_embeddings": False},
        names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
               "partial_rotary_factor": "rotary_pct"},
        fields={"norm": "layernorm", "feed_forward_bias": True},
        gated=False, prefixes=("gpt_neox.",), former_names={"embed_out": "lm_head"},
        modules=_NEOX_MODULES,
    ),
    "gpt_neox_japanese": Family(
        architectures=("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseModel"),
        shape=(32000, 2560, None, 32, 32, None, 2048), tokens=(31996, 31999),
        defaults=ROPE | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
                         "intermediate_multiple_size": 4, "tie_word_embeddings": True},
        names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base",
               "partial_rotary_factor": "rotary_pct"},
        fields={"norm": "layernorm", "output_bias": True, "d_ff": lambda options: options.whole(
            "hidden_size") * options.whole("intermediate_multiple_size")},
        gated=False, prefixes=("gpt_neox_japanese.",), former_names={"embed_out": "lm_head"},
        modules=_NEOX_MODULES | in_layers(
            "layers.*.", output=Source(("attention.dense",), zeros_if_absent=True)),
    ),
    "gpt_bigcode": Family(
        architectures=("GPTBigCodeForCausalLM", "GPTBigCodeModel"),
        shape=(50257, 768, None, 12, 12, None, 1024), tokens=(50256, 50256),
        defaults=_GPT | {"hidden_act": "gelu_pytorch_tanh", "scale_attn_weights": True,
                         "tie_word_embeddings": True, "multi_query": True},
        names=_GPT_NAMES,
        fields=_GPT2_FIELDS | {
            "n_kv_head": lambda options: 1 if options["multi_query"] else options.whole(
                "num_attention_heads")},
        gated=False, prefixes=("transformer.",),
        modules=_GPT2_MODULES | in_layers(
            "h.*.", qkv=interleaved_by_head("attn.c_attn"), output="attn.c_proj",
            up="mlp.c_fc", down="mlp.c_proj"),
    ),
    "gpt_neo": Family(
        architectures=("GPTNeoForCausalLM", "GPTNeoModel"),
        shape=(50257, 2048, None, 24, 16, None, 2048), tokens=(50256, 50256),
        defaults=_GPT | {"sliding_window": 256, "attention_types": None,
                         "tie_word_embeddings": True},
        names={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
               "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon",
               "sliding_window": "window_size"},
        fields={"position": "learned", "norm": "layernorm", "d_ff": four_times,
                "attention_scale": 1.0, "output_bias": True, "feed_forward_bias": True},
        gated=False, windowed=_gpt_neo_windows, prefixes=("transformer.",),
        modules=_GPT2_MODULES | in_layers(
            "h.*.", qkv=stacked(*(f"attn.attention.{part}_proj" for part in "qkv")),
            output="attn.attention.out_proj", up="mlp.c_fc", down="mlp.c_proj"),
    ),
    "openai-gpt": Family(
        architectures=("OpenAIGPTLMHeadModel", "OpenAIGPTModel"),
        shape=(40478, 768, None, 12, 12, None, 512), tokens=(None, None),
        defaults=_GPT | {"tie_word_embeddings": True}, names=_GPT_NAMES,
        only={"afn": ("gelu",)},  # which is gelu_new
        fields=ALL_BIASES | {"position": "learned", "norm": "layernorm",
                              "norm_placement": "post", "d_ff": always_four_times},
        gated=False, prefixes=("transformer.",),
        modules=_GPT2_MODULES | {
            "embedding": "tokens_embed", "position_embedding": "positions_embed"},
    ),
    "codegen": Family(
        architectures=("CodeGenForCausalLM", "CodeGenModel"),
        shape=(50400, 4096, None, 28, 16, None, 2048), tokens=(50256, 50256),
        defaults=_GPT | {"rotary_dim": 64, "tie_word_embeddings": False}, names=_GPT_NAMES,
        fields=_GPTJ_FIELDS, gated=False, prefixes=("transformer.",),
        modules=_GPTJ_MODULES | in_layers(
            "h.*.", qkv=pairs_apart(in_blocks("attn.qkv_proj", 4, "qvk"))),
    ),
    "gptj": Family(
        architectures=("GPTJForCausalLM", "GPTJModel"),
        shape=(50400, 4096, None, 28, 16, None, 2048), tokens=(50256, 50256),
        defaults=_GPT | {"rotary_dim": 64, "tie_word_embeddings": False}, names=_GPT_NAMES,
        fields=_GPTJ_FIELDS, gated=False, prefixes=("transformer.",), modules=_GPTJ_MODULES,
    ),
}
# fmt: on
