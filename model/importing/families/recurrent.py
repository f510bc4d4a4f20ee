"""The published decoders with recurrent layers, whose other tensors have Llama's names.

As in `llamas.py`, a row of RECURRENT says how a family differs from Llama. Modules of a recurrent
layer are named `recurrence.…`, after those of its `Mixer`.
"""

from __future__ import annotations

from typing import Any

from kvasir.model.importing.families import traits as t
from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.tensors import repeated_for_heads, stacked

_MOST_STEPS = 4096  # of a convolution, and of a width


def _lfm2_layers(options: Options) -> tuple[int, ...]:
    """Return the layers of convolutions, which layer_types or full_attn_idxs say."""
    if options["layer_types"] is None and options["full_attn_idxs"] is not None:
        listed, layers = options["full_attn_idxs"], t.every_layer(options)
        if not isinstance(listed, list) or not all(layer in layers for layer in listed):
            raise refuse("full_attn_idxs", listed, f"a list of layers from 0 to {layers[-1]}")
        kinds = ["full_attention" if layer in listed else "conv" for layer in layers]
        options["layer_types"] = kinds
    kinds = options.layer_kinds("layer_types", ("conv", "full_attention")) or []
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")


def _short_convolution(options: Options) -> dict[str, Any] | None:
    if not _lfm2_layers(options):
        return None
    kernel = options.whole("conv_L_cache", least=2, most=_MOST_STEPS)
    return {"kind": "short_convolution", "kernel": kernel, "bias": options["conv_bias"]}


def _lfm2_width(options: Options) -> int:
    """Return the width of feed-forwards, which may be given before it is rounded (LFM2)."""
    width = options.whole("intermediate_size")
    if not options["block_auto_adjust_ff_dim"]:
        return width
    width, multiple = int(2 * width / 3), options.whole("block_multiple_of", most=_MOST_STEPS)
    if options["block_ffn_dim_multiplier"] is None:
        return width
    return -(-int(options.number("block_ffn_dim_multiplier") * width) // multiple) * multiple


def _lfm2_choice(options: Options) -> str | None:
    return "scores" if options["use_expert_bias"] else None


# fmt: off
_LFM2: t.Trait = {
    "keys": {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True,
             "layer_types": None, "full_attn_idxs": None, "conv_L_cache": 3, "conv_bias": False},
    "names": {"rms_norm_eps": "norm_eps",
              "tie_word_embeddings": "tie_embedding|tie_word_embeddings"},
    "norm": "embedding_norm",
    "fields": {"recurrent_layers": _lfm2_layers, "recurrence": _short_convolution,
               "qk_norm": True},
    "layers": {
        "attention_norm": "operator_norm", "feed_forward_norm": "ffn_norm",
        "output": "self_attn.out_proj",
        "query_norm": repeated_for_heads("self_attn.q_layernorm"),
        "key_norm": repeated_for_heads("self_attn.k_layernorm"),
        "up": stacked("feed_forward.w1", "feed_forward.w3"), "down": "feed_forward.w2",
        "recurrence.input": "conv.in_proj", "recurrence.output": "conv.out_proj",
        "recurrence.convolution": "conv.conv"}}
RECURRENT: dict[str, Family] = {
    "lfm2": t.llama(
        "Lfm2", (65536, 2560, 12288, 32, 32, 8, 128000), (1, 2), _LFM2,
        keys={"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
              "block_auto_adjust_ff_dim": True},
        names={"intermediate_size": "block_ff_dim|intermediate_size"},
        fields={"d_ff": _lfm2_width}),
    "lfm2_moe": t.llama(
        "Lfm2Moe", (65536, 2048, 7168, 32, 32, 8, 128000), (1, 2), _LFM2,
        t.experts(32, 4, 1792, router="feed_forward.gate", parts="feed_forward.experts.#.{}",
                  names=("w1", "w3", "w2")),
        keys={"num_dense_layers": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
              "use_expert_bias": True},
        fields={"router": "sigmoid", "choice_bias": _lfm2_choice,
                "dense_layers": lambda o: tuple(range(o.whole("num_dense_layers", least=0)))},
        layers={"choice_bias": "feed_forward.expert_bias"}),
}
# fmt: on
