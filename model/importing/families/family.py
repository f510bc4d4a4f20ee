"""The conversion of a published config.json into a TransformerConfig.

A value that the network does not compute is refused, with its key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.model.config import TransformerConfig
from kvasir.model.configuration.parts import Activation
from kvasir.model.importing.families.options import Options, given, only, refuse
from kvasir.model.importing.families.positions import head_dim, rotary_fields, window_fields
from kvasir.model.importing.tensors import Source, module_and_kind, scaled

MOST_LAYERS = 10_000
_ABSENT = object()
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh")
_PLAIN = {"gelu": "gelu", "gelu_python": "gelu", **dict.fromkeys(_GELU_TANH, "gelu_tanh")}
_PLAIN |= {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2"}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_python": "geglu"}
_GATED |= dict.fromkeys(_GELU_TANH, "geglu_tanh")
_BESIDE = re.compile(r"(?<=_proj)_(?=bias$)|(?<=dense)_(?=bias$)")
# fmt: off
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "bos_token_id", "eos_token_id",
)
# Field of TransformerConfig: the usual key of config.json whose value it takes unchanged.
_FIELDS = {
    "vocab_size": "vocab_size", "d_model": "hidden_size", "d_ff": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "max_model_len": "max_position_embeddings", "sliding_window": "sliding_window",
    "norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings",
    "qkv_bias": "attention_bias", "output_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias", "parallel_residual": "use_parallel_residual",
    "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping",
    "attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "n_experts_per_token": "num_experts_per_tok", "d_expert": "moe_intermediate_size",
    "normalize_expert_shares": "norm_topk_prob", "expert_scale": "routed_scaling_factor",
    "n_expert_groups": "n_group", "n_groups_per_token": "topk_group", "qkv_clip": "clip_qkv",
    "n_token_types": "type_vocab_size",
    "norm_bias": "norm_bias", "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
}
# Keys that change what is computed, and the values, beside null, that do not. A family that reads a
# key decides about its values itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "alibi": (False,), "is_encoder_decoder": (False,),
    "qk_layernorm": (False,), "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,), "sliding_window": (), "use_sliding_window": (False,),
    "num_experts": (0,), "num_local_experts": (0,), "partial_rotary_factor": (1,),
    "pruned_heads": ({},), "quantization_config": (), "clip_qkv": (), "layer_types": (),
    "is_causal": (True,), "no_rope_layers": (), "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after a pooling: the modules of a file that hold it and its norm.

    d_out: None is d_model, or the number of labels at the end.
    """

    module: str
    activation: Activation = "identity"
    bias: bool = True
    norm: str | None = None
    d_out: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of published model: the keys of its config.json, and the names of its tensors.

    Keys have Llama's names throughout, except in `only`, which has the family's own.
    """

    architectures: tuple[str, ...]  # accepted values of "architectures", the usual one first
    # From our module to the one that holds its weight and bias in the checkpoint, or to a Source
    # if they are stored differently. `*` stands for a layer; names of one layer go first.
    modules: Mapping[str, str | Source]
    shape: tuple[int | None, ...]  # defaults of vocab_size to max_position_embeddings in _SHAPE
    tokens: tuple[int | None, int | list[int] | None]  # of bos_token_id and eos_token_id
    defaults: dict[str, Any]  # every other key that is read
    names: Mapping[str, str] = field(default_factory=dict)  # the family's own names of keys
    # By field of TransformerConfig: its value, or a function of the options.
    fields: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that are computed
    gated: bool = True  # the feed-forward has a gate
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")  # of rotary positions
    # Returns the layers with a sliding window, where layer_types does not list them.
    windowed: Callable[[Options], Iterable[int]] | None = None
    rotary_in_windows: bool = False  # and in no other layer, where there are windows
    # By our module: a factor of its weight and bias, which are then float32.
    scales: Mapping[str, Callable[[Options], float]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)  # of tensor names; a file has one or none
    # Of parts of tensor names, between dots: the one in `modules`.
    former_names: Mapping[str, str] = field(default_factory=dict)
    classifier: tuple[Dense, ...] = (Dense("score", bias=False),)  # of ...ForSequenceClassification
    unused: tuple[str, ...] = ()  # beginnings of names of tensors that are left out
    # Returns modules whose places the options decide.
    variant: Callable[[Options], Mapping[str, Source]] | None = None
    encoder: Family | None = None  # of a decoder that has one; it reads the same config.json
    same_embeddings: tuple[str, ...] = ()  # modules whose weight must be the embedding's
    start_token: int | None = None  # the default of decoder_start_token_id, with an encoder

    def options(self, values: Mapping[str, Any]) -> Options:
        """Return the keys that the family reads from a config.json."""
        defaults = dict(zip(_SHAPE, (*self.shape, *self.tokens), strict=True)) | self.defaults
        read = {}
        for key, default in defaults.items():
            names = (*self.names.get(key, key).split("|"), key)  # "a|b" is b where there is no a
            # A null is a value, but for rope_parameters, of which transformers takes the default.
            nothing = None if key == "rope_parameters" else _ABSENT
            found = (given(values, name, nothing) for name in names)
            read[key] = next((value for value in found if value is not nothing), default)
        return Options(read, self.names)

    def adapted(self, values: Mapping[str, Any]) -> Family:
        """Return the family with the places and factors of its modules that values decide.

        Those of its encoder are among them.
        """
        options, modules = self.options(values), dict(self.modules)
        if self.variant is not None:
            modules |= self.variant(options)
        for module, factor in self.scales.items():
            if module in modules and (by := factor(options)) != 1.0:
                modules[module] = scaled(self.source(module), by)
        # Layers that predict further tokens, which only speculation would run.
        n_layers, n_more = values.get("num_hidden_layers"), values.get("num_nextn_predict_layers")
        unused = self.unused
        if type(n_layers) is int and type(n_more) is int:
            unused += tuple(f"layers.{n_layers + i}." for i in range(min(n_more, 16)))
        if self.encoder is not None:
            inner = self.encoder.adapted(values).modules
            modules |= {f"encoder.{module}": source for module, source in inner.items()}
        return replace(self, modules=modules, unused=unused)

    def config(self, values: Mapping[str, Any], **tokens: Any) -> TransformerConfig:
        """Return the TransformerConfig for a config.json, with bos_token_id and eos_token_ids.

        Raises UnsupportedError for what the decoder does not compute, and ConfigError.
        """
        options = self.options(values)
        options.whole("num_hidden_layers", most=MOST_LAYERS)
        read = {name for key in options for name in self.names.get(key, key).split("|")}
        # Beside the family's own name the usual one may say the same.
        neutral = {
            key: (None, *allowed, *([options[key]] if key in options else ()))
            for key, allowed in NEUTRAL.items()
            if key not in read
        }
        if values.get("use_sliding_window") is False:
            neutral.pop("sliding_window", None)
        for key, allowed in {**neutral, **self.only}.items():
            value = given(values, key, _ABSENT)
            if value is not _ABSENT and value not in allowed:
                wanted = f"{self.architectures[0]} without it" if key in neutral else only(allowed)
                raise refuse(key, value, wanted)
        fields = {name: options[key] for name, key in _FIELDS.items() if key in options}
        position = self.fields.get("position")
        if callable(position):
            position = position(options)
        if "rope_theta" in options and position != "none":
            fields |= rotary_fields(options, self.scalings)
        if self.windowed is not None:
            fields |= window_fields(
                options, self.windowed, rotary_in_windows=self.rotary_in_windows
            )
            if fields["sliding_window"] is None:
                fields.pop("sliding_window_rope_theta", None)
        grouped = options["num_key_value_heads"] is not None
        fields["n_kv_head"] = options.whole(f"num_{'key_value' if grouped else 'attention'}_heads")
        fields["head_dim"] = head_dim(options)
        if "feed_forward" not in self.fields:
            activations, name = _GATED if self.gated else _PLAIN, options["hidden_act"]
            if not isinstance(name, str) or name not in activations:
                raise refuse(self.names.get("hidden_act", "hidden_act"), name, only(activations))
            fields["feed_forward"] = activations[name]
        for name, setting in self.fields.items():
            fields[name] = setting(options) if callable(setting) else setting
        if self.encoder is not None:
            fields["encoder"] = self.encoder.config(values)
        return TransformerConfig(**{**fields, **tokens})

    def source(self, module: str) -> Source:
        """Return the place of a module of ours."""
        place = self.modules[module]
        return Source((place,)) if isinstance(place, str) else place

    def plain_name(self, tensor: str) -> str:
        """Return a tensor's module without its prefix, as `modules` has it, and its kind."""
        tensor = _BESIDE.sub(".", tensor)
        prefix = next((prefix for prefix in self.prefixes if tensor.startswith(prefix)), "")
        module, kind = module_and_kind(tensor.removeprefix(prefix))
        parts = [self.former_names.get(part, part) for part in module.split(".")]
        return ".".join((*parts, kind))
