"""The published decoders that Kvasir reads.

To add one, add a `Family` to DECODERS, to `gpts.py` or, where its tensors have Llama's names, to a
file of `llamas/`; its fields say what belongs there. Keys, defaults and tensor names are those of
Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

from kvasir.model.configuration.parts import Projection
from kvasir.model.importing.families.encoders import ENCODERS, MODERNBERT_ONLY
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.gpts import GPTS, always_four_times, four_times
from kvasir.model.importing.families.llamas.first_mambas import FIRST_MAMBAS
from kvasir.model.importing.families.llamas.kimis import KIMIS
from kvasir.model.importing.families.llamas.latents import LATENTS
from kvasir.model.importing.families.llamas.llamas import LLAMAS
from kvasir.model.importing.families.llamas.mambas import MAMBAS
from kvasir.model.importing.families.llamas.mixtures import MIXTURES
from kvasir.model.importing.families.llamas.recurrent import RECURRENT
from kvasir.model.importing.families.llamas.traits import (
    ALL_BIASES,
    ROPE,
    fairseq,
    scaled_embedding,
)
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.heads import interleaved_by_head
from kvasir.model.importing.tensors import (
    all_ones,
    computed,
    fairseq_sinusoids,
    in_layers,
    rows_of_experts,
    stacked,
    without_rows,
)

_LAYER_NORM = {"norm": "layernorm", "norm_eps": 1e-5}
_FAIRSEQ = fairseq("layers.*.")
_FALCON_MODULES = {"embedding": "word_embeddings", "norm": "ln_f", "head": "lm_head"} | in_layers(
    "h.*.",
    qkv=interleaved_by_head("self_attention.query_key_value"),
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _falcon_kv_heads(options: Options) -> int:
    if options["multi_query"] and not options["new_decoder_architecture"]:
        return 1
    grouped = options["num_key_value_heads"] is not None
    return options.whole(f"num_{'key_value' if grouped else 'attention'}_heads")


def _modernbert_windows(options: Options) -> list[int]:
    options["sliding_window"] = options.whole("sliding_window", least=2) // 2
    every = options.whole("global_attn_every_n_layers")
    return [layer for layer in range(options.whole("num_hidden_layers")) if layer % every]


def _modernbert_head(options: Options) -> Projection:
    width = options.whole("hidden_size")
    return Projection(d_out=width, activation="gelu", bias=False, norm=True)


def _opt_width(options: Options) -> int:
    width, projected = options.whole("hidden_size"), options["word_embed_proj_dim"]
    if projected not in (None, width):
        raise refuse("word_embed_proj_dim", projected, f"only hidden_size, {width} (opt-350m)")
    return width


_MODERNBERT = ENCODERS["modernbert"]
# fmt: off
_HYBRIDS = RECURRENT | KIMIS | MAMBAS | FIRST_MAMBAS
DECODERS: dict[str, Family] = GPTS | LLAMAS | MIXTURES | LATENTS | _HYBRIDS | {
    "biogpt": Family(
        architectures=("BioGptForCausalLM", "BioGptModel"),
        shape=(42384, 1024, 4096, 24, 16, None, 1024), tokens=(0, 2),
        defaults={"hidden_act": "gelu", "scale_embedding": True, "tie_word_embeddings": True},
        fields=ALL_BIASES | _LAYER_NORM | {"position": "learned",
                                            "embedding_scale": scaled_embedding},
        gated=False, prefixes=("biogpt.",),
        modules=_FAIRSEQ | {
            "embedding": "embed_tokens", "norm": "layer_norm", "head": "output_projection",
            "position_embedding": without_rows("embed_positions", 2)},
    ),
    "xglm": Family(
        architectures=("XGLMForCausalLM", "XGLMModel"),
        shape=(256008, 1024, 4096, 24, 16, None, 2048), tokens=(0, 2),
        defaults={"hidden_act": "gelu", "scale_embedding": True, "tie_word_embeddings": True},
        names={"hidden_size": "d_model", "intermediate_size": "ffn_dim",
               "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads",
               "hidden_act": "activation_function"},
        fields=ALL_BIASES | _LAYER_NORM | {"position": "learned",
                                            "embedding_scale": scaled_embedding},
        gated=False, unused=("embed_positions",),
        modules=_FAIRSEQ | {
            "embedding": "embed_tokens", "norm": "layer_norm", "head": "lm_head",
            "position_embedding": computed(fairseq_sinusoids)},
    ),
    "mpt": Family(
        architectures=("MptForCausalLM", "MptModel"),
        shape=(50368, 2048, None, 24, 16, None, 2048), tokens=(None, None),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "clip_qkv": None,
                  "attention_multiplier": None},
        names={"hidden_size": "d_model", "num_hidden_layers": "n_layers",
               "num_attention_heads": "n_heads", "rms_norm_eps": "layer_norm_epsilon",
               "max_position_embeddings": "max_seq_len", "clip_qkv": "attn_config.clip_qkv",
               "attention_multiplier": "attn_config.softmax_scale"},
        only={"no_bias": (True,), "logit_scale": (None,), "embedding_fraction": (1.0,),
              "attn_config.alibi": (True,), "attn_config.alibi_bias_max": (8,),
              "attn_config.qk_ln": (False,), "attn_config.prefix_lm": (False,),
              "attn_config.attn_type": ("multihead_attention",)},
        fields={"position": "alibi", "norm": "layernorm", "norm_bias": False,
                "d_ff": always_four_times,
                "feed_forward": "gelu"},
        prefixes=("transformer.",),
        modules={"embedding": "wte", "norm": "norm_f", "head": "lm_head"} | in_layers(
            "blocks.*.", attention_norm="norm_1", feed_forward_norm="norm_2", qkv="attn.Wqkv",
            output="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj", clip=all_ones()),
    ),
    "dbrx": Family(
        architectures=("DbrxForCausalLM", "DbrxModel"),
        shape=(32000, 2048, 3584, 24, 16, 1, 2048), tokens=(None, None),
        defaults=ROPE | {"tie_word_embeddings": False, "clip_qkv": None, "num_experts": 4,
                         "num_experts_per_tok": 1},
        names={"hidden_size": "d_model", "num_attention_heads": "n_heads",
               "num_hidden_layers": "n_layers", "max_position_embeddings": "max_seq_len"}
        | {key: f"attn_config.{name}" for key, name in (
            ("num_key_value_heads", "kv_n_heads"), ("clip_qkv", "clip_qkv"),
            ("rope_theta", "rope_theta"))}
        | {key: f"ffn_config.{name}" for key, name in (
            ("intermediate_size", "ffn_hidden_size"), ("num_experts", "moe_num_experts"),
            ("num_experts_per_tok", "moe_top_k"))},
        only={"ffn_config.ffn_act_fn": ({"name": "silu"}, None),
              "ffn_config.moe_normalize_expert_weights": (1,)},
        fields=_LAYER_NORM | {
            "norm_bias": False, "feed_forward": "swiglu", "normalize_expert_shares": True,
            "n_experts": itemgetter("num_experts"), "d_expert": itemgetter("intermediate_size")},
        prefixes=("transformer.",),
        modules={"embedding": "wte", "norm": "norm_f", "head": "lm_head"} | in_layers(
            "blocks.*.", attention_norm="norm_attn_norm.norm_1",
            feed_forward_norm="norm_attn_norm.norm_2", qkv="norm_attn_norm.attn.Wqkv",
            output="norm_attn_norm.attn.out_proj", clip=all_ones(), router="ffn.router.layer",
            expert_up=rows_of_experts("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
            expert_down=rows_of_experts("ffn.experts.mlp.w2", transposed=True)),
    ),
    "modernbert-decoder": replace(
        _MODERNBERT, architectures=("ModernBertDecoderForCausalLM", "ModernBertDecoderModel"),
        tokens=(50281, 50282),
        only=MODERNBERT_ONLY,
        names={**_MODERNBERT.names, "sliding_window": "local_attention|sliding_window"},
        defaults=_MODERNBERT.defaults | {"tie_word_embeddings": True, "decoder_bias": True},
        fields={**_MODERNBERT.fields, "causal": True, "head_bias": itemgetter("decoder_bias"),
                "head_projection": _modernbert_head},
        windowed=_modernbert_windows, unused=(),
        modules={**_MODERNBERT.modules, "norm.0": "final_norm", "head": "decoder",
                 "norm.1.linear": "lm_head.dense", "norm.1.norm": "lm_head.norm"}
        | in_layers("layers.*.", qkv=stacked(*(f"attn.{part}_proj" for part in "qkv"))),
    ),
    "opt": Family(
        architectures=("OPTForCausalLM", "OPTModel"),
        shape=(50272, 768, 3072, 12, 12, None, 2048), tokens=(2, 2),
        defaults={"hidden_act": "relu", "attention_bias": True, "mlp_bias": True,
                  "word_embed_proj_dim": None, "tie_word_embeddings": True},
        names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function",
               "attention_bias": "enable_bias", "mlp_bias": "enable_bias"},
        only={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
              "layer_norm_elementwise_affine": (True,)},
        fields={"position": "learned", "norm": "layernorm", "norm_eps": 1e-5,
                "d_model": _opt_width},
        gated=False, prefixes=("model.decoder.", "decoder."),
        modules=_FAIRSEQ | {
            "embedding": "embed_tokens", "norm": "final_layer_norm", "head": "lm_head",
            "position_embedding": without_rows("embed_positions", 2)},
    ),
    "falcon": Family(
        architectures=("FalconForCausalLM", "FalconModel"),
        shape=(65024, 4544, None, 32, 71, None, 2048), tokens=(11, 11),
        defaults=ROPE | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": False,
                         "mlp_bias": False, "tie_word_embeddings": True, "multi_query": True,
                         "new_decoder_architecture": False},
        names={"hidden_act": "activation", "rms_norm_eps": "layer_norm_epsilon",
               "attention_bias": "bias", "mlp_bias": "bias", "hidden_size": "n_embed",
               "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        only={"parallel_attn": (True,)},
        fields={"norm": "layernorm", "parallel_residual": True, "d_ff": four_times,
                "n_kv_head": _falcon_kv_heads},
        gated=False, prefixes=("transformer.",),
        modules=_FALCON_MODULES | in_layers(
            "h.*.", attention_norm="ln_attn|input_layernorm",
            feed_forward_norm="ln_mlp|input_layernorm"),
    ),
    "bloom": Family(
        architectures=("BloomForCausalLM", "BloomModel"),
        shape=(250880, 64, None, 2, 8, None, 2048), tokens=(1, 2),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        names={"hidden_size": "n_embed", "num_hidden_layers": "n_layer",
               "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon",
               "max_position_embeddings": "seq_length"},
        only={"apply_residual_connection_post_layernorm": (False,)},
        fields=ALL_BIASES | {"position": "alibi", "norm": "layernorm", "embedding_norm": True,
                              "d_ff": always_four_times,
                              "feed_forward": "gelu_tanh"},
        prefixes=("transformer.",),
        modules=_FALCON_MODULES | {"embedding_norm": "word_embeddings_layernorm"} | in_layers(
            "h.*.", attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"),
    ),
}
# Models that also see images: their architecture, and the usual model_type of their text part.
WITH_VISION: dict[str, tuple[str, str]] = {
    "emu3": ("Emu3ForConditionalGeneration", "emu3_text_model"),
    "fuyu": ("FuyuForCausalLM", "persimmon"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "llama4": ("Llama4ForConditionalGeneration", "llama4_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
}
# fmt: on
