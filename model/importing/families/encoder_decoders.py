"""The published encoder-decoders that Kvasir reads.

As `decoders.py` has it: to add one, add a `Family` to ENCODER_DECODERS, with that of its encoder.
Keys, defaults and tensor names are those of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas.traits import ALL_BIASES, fairseq, scaled_embedding
from kvasir.model.importing.families.options import Options, refuse
from kvasir.model.importing.tensors import (
    Source,
    computed,
    fairseq_sinusoids,
    halves,
    in_layers,
    stacked,
    without_first_axis,
    without_rows,
)

_T5_KINDS = {
    "relu": "relu",
    "gelu": "gelu",
    "gated-relu": None,
    "gated-gelu": "geglu_tanh",  # for transformers this word means the approximation
    "gated-silu": "swiglu",
}


def _t5_feed_forward(options: Options) -> str:
    kind = options["feed_forward_proj"]
    computed_kinds = [name for name, ours in _T5_KINDS.items() if ours]
    if kind not in computed_kinds:
        raise refuse("feed_forward_proj", kind, "only " + " or ".join(map(repr, computed_kinds)))
    activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if (given := options["dense_act_fn"]) not in (None, activation):
        raise refuse("dense_act_fn", given, f"only {activation!r} with feed_forward_proj {kind!r}")
    return str(_T5_KINDS[kind])


def _t5_scale(options: Options) -> float:
    """Return the factor of what the head reads; T5 1.1 has none, and a head of its own."""
    scaled = options["scale_decoder_outputs"]
    if scaled is None:  # files before transformers 5
        scaled = options["tie_word_embeddings"] is not False
    return options.whole("hidden_size") ** -0.5 if scaled else 1.0


def _t5_layer(side: str, layer: int) -> Callable[[Options], Mapping[str, Source]]:
    """Return the modules of a feed-forward, which has a gate or none."""
    inner = f"{side}.block.*.layer.{layer}.DenseReluDense"

    def modules(options: Options) -> Mapping[str, Source]:
        gated = str(options["feed_forward_proj"]).startswith("gated")
        names = (f"{inner}.wi_0", f"{inner}.wi_1") if gated else (f"{inner}.wi",)
        return {"blocks.*.feed_forward.up": stacked(*names)}

    return modules


def _t5_modules(side: str, last: int) -> dict[str, str | Source]:
    """Return the modules of one side; `last` is the number of a layer's feed-forward."""
    attention = "0.SelfAttention"
    return {
        "relative_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        "norm": f"{side}.final_layer_norm",
    } | in_layers(
        f"{side}.block.*.layer.",
        attention_norm="0.layer_norm",
        qkv=stacked(*(f"{attention}.{part}" for part in "qkv")),
        output=f"{attention}.o",
        feed_forward_norm=f"{last}.layer_norm",
        down=f"{last}.DenseReluDense.wo",
    )


def _bart_modules(side: str) -> dict[str, str | Source]:
    return fairseq(f"{side}.layers.*.") | {
        "position_embedding": without_rows(f"{side}.embed_positions", 2),
        "embedding_norm": f"{side}.layernorm_embedding",
        "norm": f"{side}.layer_norm",
    }


def _bart_names(side: str) -> dict[str, str]:
    return {
        "hidden_size": "d_model",
        "hidden_act": "activation_function",
        "num_hidden_layers": f"{side}_layers",
        "num_attention_heads": f"{side}_attention_heads",
        "intermediate_size": f"{side}_ffn_dim",
    }


def _marian_sinusoids(n_positions: int, d_model: int) -> Tensor:
    """Make the table of Vaswani et al. 2017, section 3.5, with all sines before all cosines."""
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    return halves(torch.outer(torch.arange(n_positions, dtype=torch.float64), 10000.0**-pairs))


def _with_sinusoids(family: Family, table: Callable[[int, int], Tensor]) -> Family:
    """Return a family whose positions are computed; they become a table of learned ones."""
    assert family.encoder is not None
    of_both = []
    for side in (family, family.encoder):
        modules = {**side.modules, "position_embedding": computed(table)}
        of_both.append(replace(side, modules=modules))
    unused = tuple(f"{side}.embed_positions." for side in ("encoder", "decoder"))
    return replace(of_both[0], encoder=of_both[1], unused=unused)


_NOT_ALONE: dict[str, tuple[Any, ...]] = {"is_encoder_decoder": (True,)}
_T5_NAMES = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions",
}
_T5_FIELDS: dict[str, Any] = {
    "position": "relative",
    "attention_scale": 1.0,
    "feed_forward": _t5_feed_forward,
}
_BART_FIELDS: dict[str, Any] = ALL_BIASES | {
    "position": "learned",
    "norm": "layernorm",
    "norm_placement": "post",
    "embedding_scale": scaled_embedding,
}
_ENCODER: dict[str, Any] = {"causal": False, "tied_embeddings": True}
_SIDES = ("encoder.embed_tokens", "decoder.embed_tokens")

# fmt: off
_T5_ENCODER = Family(
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    shape=(32128, 512, 2048, 6, 8, None, 512), tokens=(None, None),
    defaults={"head_dim": 64, "rms_norm_eps": 1e-6, "feed_forward_proj": "relu",
              "dense_act_fn": None,
              "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    names=_T5_NAMES, only=_NOT_ALONE,
    fields=_T5_FIELDS | _ENCODER,
    modules=_t5_modules("encoder", 1), variant=_t5_layer("encoder", 1),
)
_T5 = replace(
    _T5_ENCODER,
    tokens=(None, 1), encoder=_T5_ENCODER,
    defaults=_T5_ENCODER.defaults | {"tie_word_embeddings": True,
                                     "scale_decoder_outputs": None},
    names=_T5_NAMES | {"num_hidden_layers": "num_decoder_layers|num_layers"},
    fields=_T5_FIELDS | {"tied_embeddings": True},  # unless the file holds another head
    scales={"norm": _t5_scale},
    start_token=0, same_embeddings=_SIDES,
    modules=_t5_modules("decoder", 2) | {
        "embedding": "shared", "head": "lm_head",
        "blocks.*.cross_attention.output": "decoder.block.*.layer.1.EncDecAttention.o",
    } | in_layers(
        "decoder.block.*.layer.1.", cross_attention_norm="layer_norm", query="EncDecAttention.q",
        key_value=stacked("EncDecAttention.k", "EncDecAttention.v")),
    variant=_t5_layer("decoder", 2),
)
_BART_ENCODER = Family(
    architectures=("BartForConditionalGeneration",),
    shape=(50265, 1024, 4096, 12, 16, None, 1024), tokens=(None, None),
    defaults={"hidden_act": "gelu", "scale_embedding": False},
    names=_bart_names("encoder"), only=_NOT_ALONE,
    fields=_BART_FIELDS | _ENCODER | {"embedding_norm": True},
    gated=False, modules=_bart_modules("encoder"),
)
_BART = replace(
    _BART_ENCODER, tokens=(None, 2),
    encoder=_BART_ENCODER, names=_bart_names("decoder"),
    fields=_BART_FIELDS | {"embedding_norm": True},
    start_token=2, same_embeddings=(*_SIDES, "lm_head"),
    modules=_bart_modules("decoder") | {
        "embedding": "shared", "head": without_first_axis("final_logits_bias"),
        "blocks.*.cross_attention.output": "decoder.layers.*.encoder_attn.out_proj",
    } | in_layers(
        "decoder.layers.*.", cross_attention_norm="encoder_attn_layer_norm",
        query="encoder_attn.q_proj",
        key_value=stacked("encoder_attn.k_proj", "encoder_attn.v_proj")),
)


def _like_bart(architecture: str, **changes: Any) -> Family:
    """Return a family with BART's modules; `fields` and `defaults` are added on both sides."""
    fields, defaults = changes.pop("fields"), changes.pop("defaults", {})
    of_both = []
    for side in (_BART, _BART_ENCODER):
        new = {"architectures": (architecture,), "fields": {**side.fields, **fields},
               "defaults": {**side.defaults, **defaults},
               "only": {**side.only, **changes.get("only", {})}}
        of_both.append(replace(side, **(changes | new)))
    return replace(of_both[0], encoder=of_both[1])


_MT5_SHAPE = (250112, 512, 1024, 8, 6, None, 512)
_PRE: dict[str, Any] = {"norm_placement": "pre", "embedding_norm": False}
ENCODER_DECODERS: dict[str, Family] = {
    "t5": _T5,
    "mt5": replace(
        _T5, architectures=("MT5ForConditionalGeneration",), scales={}, shape=_MT5_SHAPE,
        defaults=_T5.defaults | {"feed_forward_proj": "gated-gelu"},
        encoder=replace(_T5_ENCODER, shape=_MT5_SHAPE, defaults=_T5_ENCODER.defaults | {
            "feed_forward_proj": "gated-gelu"}),
    ),
    "bart": _BART,
    "mbart": _like_bart("MBartForConditionalGeneration", fields={"norm_placement": "pre"}),
    "marian": _with_sinusoids(
        _like_bart(
            "MarianMTModel", fields={"embedding_norm": False}, start_token=58100,
            shape=(58101, 1024, 4096, 12, 16, None, 1024), tokens=(None, 0),
            only={"share_encoder_decoder_embeddings": (True, None)}),
        _marian_sinusoids),
    "m2m_100": _with_sinusoids(
        _like_bart("M2M100ForConditionalGeneration", fields=_PRE,
                   defaults={"scale_embedding": True, "hidden_act": "relu"},
                   shape=(128112, 1024, 4096, 12, 16, None, 1024)),
        fairseq_sinusoids),
    "pegasus": _with_sinusoids(
        _like_bart("PegasusForConditionalGeneration", fields=_PRE, tokens=(None, 1),
                   start_token=0),
        _marian_sinusoids),
}
# fmt: on
