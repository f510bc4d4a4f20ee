"""The published encoders that Kvasir reads.

As `decoders.py` has it: to add one, add a `Family` to ENCODERS. Keys, defaults and tensor names are
those of Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvasir.model.importing.families.family import Dense, Family
from kvasir.model.importing.families.llamas.traits import ALL_BIASES, ROPE
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.tensors import in_layers, stacked, without_rows


def _architectures(name: str) -> tuple[str, ...]:
    kinds = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
    return tuple(f"{name}{kind}" for kind in kinds)


def _after_padding(options: Options) -> int:
    """Return the number of positions; the first 2 of the table are of padding."""
    return options.whole("max_position_embeddings", least=4) - 2


def _modernbert_windows(options: Options) -> list[int]:
    options["sliding_window"] = options.whole("sliding_window") // 2 + 1  # on either side
    every = options.whole("global_attn_every_n_layers")
    return [layer for layer in range(options.whole("num_hidden_layers")) if layer % every]


_POST_NORM: dict[str, Any] = {
    "causal": False,
    "norm": "layernorm",
    "norm_placement": "post",
    "embedding_norm": True,
}
_BERT_FIELDS = _POST_NORM | ALL_BIASES | {"position": "learned"}
_BERT = {"hidden_act": "gelu", "rms_norm_eps": 1e-12}
_BERT_NAMES = {"rms_norm_eps": "layer_norm_eps"}
_NOT_CAUSAL = {"is_causal": (False,), "is_decoder": (False,)}
_BERT_ONLY = _NOT_CAUSAL | {"position_embedding_type": ("absolute", None)}
MODERNBERT_ONLY: dict[str, tuple[Any, ...]] = {
    "classifier_bias": (False,),
    "classifier_activation": ("gelu",),
    "rope_scaling": (None,),  # transformers scales windows by it, too
}
_BERT_MODULES = in_layers(
    "encoder.layer.*.",
    qkv=stacked(*(f"attention.self.{part}" for part in ("query", "key", "value"))),
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    feed_forward_norm="output.LayerNorm",
) | {
    "embedding": "embeddings.word_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "position_embedding": "embeddings.position_embeddings",
    "token_type_embedding": "embeddings.token_type_embeddings",
}
_BERT_CLASSIFIER = (Dense("pooler.dense", "tanh"), Dense("classifier"))
_ROBERTA_CLASSIFIER = (Dense("classifier.dense", "tanh"), Dense("classifier.out_proj"))

# fmt: off
_ROBERTA = Family(
    architectures=_architectures("Roberta"),
    shape=(50265, 768, 3072, 12, 12, None, 512), tokens=(None, None),
    defaults=_BERT | {"type_vocab_size": 2},
    names=_BERT_NAMES,
    only=_BERT_ONLY | {"pad_token_id": (1,)},
    fields=_BERT_FIELDS | {"max_model_len": _after_padding},
    gated=False, prefixes=("roberta.",), unused=("pooler.", "lm_head."),
    classifier=_ROBERTA_CLASSIFIER,
    modules=_BERT_MODULES | {
        "position_embedding": without_rows("embeddings.position_embeddings", 2)},
)
ENCODERS: dict[str, Family] = {
    "bert": Family(
        architectures=_architectures("Bert"),
        shape=(30522, 768, 3072, 12, 12, None, 512), tokens=(None, None),
        defaults=_BERT | {"type_vocab_size": 2},
        names=_BERT_NAMES, only=_BERT_ONLY,
        fields=_BERT_FIELDS,
        gated=False, prefixes=("bert.",), unused=("pooler.", "cls."),
        classifier=_BERT_CLASSIFIER,
        modules=_BERT_MODULES,
    ),
    "distilbert": Family(
        architectures=_architectures("DistilBert"),
        shape=(30522, 768, 3072, 6, 12, None, 512), tokens=(None, None),
        defaults={"hidden_act": "gelu"},
        names={"hidden_size": "dim", "num_hidden_layers": "n_layers", "hidden_act": "activation",
               "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"},
        only=_NOT_CAUSAL,
        fields=_BERT_FIELDS | {"norm_eps": 1e-12},
        gated=False, prefixes=("distilbert.",), unused=("vocab_",),
        classifier=(Dense("pre_classifier", "relu"), Dense("classifier")),
        modules=_BERT_MODULES | in_layers(
            "transformer.layer.*.", qkv=stacked(*(f"attention.{part}_lin" for part in "qkv")),
            output="attention.out_lin", attention_norm="sa_layer_norm",
            up="ffn.lin1", down="ffn.lin2", feed_forward_norm="output_layer_norm"),
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": replace(
        _ROBERTA, architectures=_architectures("XLMRoberta"), shape=(30522, *_ROBERTA.shape[1:])),
    "camembert": replace(
        _ROBERTA, architectures=_architectures("Camembert"), shape=(30522, *_ROBERTA.shape[1:])),
    "mpnet": Family(
        architectures=_architectures("MPNet"),
        shape=(30527, 768, 3072, 12, 12, None, 512), tokens=(None, None),
        defaults=_BERT,
        names=_BERT_NAMES, only=_NOT_CAUSAL | {"relative_attention_num_buckets": (32,)},
        fields=_BERT_FIELDS | {"position": "learned_relative", "max_model_len": _after_padding},
        gated=False, prefixes=("mpnet.",), unused=("pooler.", "lm_head."),
        classifier=_ROBERTA_CLASSIFIER,
        modules=_BERT_MODULES | {
            "position_embedding": without_rows("embeddings.position_embeddings", 2),
            "relative_bias": "encoder.relative_attention_bias",
        } | in_layers(
            "encoder.layer.*.", qkv=stacked(*(f"attention.attn.{part}" for part in "qkv")),
            output="attention.attn.o", attention_norm="attention.LayerNorm"),
    ),
    "modernbert": Family(
        architectures=_architectures("ModernBert"),
        shape=(50368, 768, 1152, 22, 12, None, 8192), tokens=(None, None),
        defaults=ROPE | {
            "hidden_act": "gelu", "rms_norm_eps": 1e-5, "norm_bias": False,
            "attention_bias": False, "mlp_bias": False, "layer_types": None,
            "sliding_window": 128, "global_attn_every_n_layers": 3,
            "rope_theta": 160000.0, "rope_local_base_freq": 10000.0},
        names={"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps",
               "sliding_window": "local_attention", "rope_theta": "global_rope_theta",
               "rope_local_base_freq": "local_rope_theta"},
        only=_NOT_CAUSAL | MODERNBERT_ONLY,
        fields={"causal": False, "norm": "layernorm", "embedding_norm": True,
                "layers_without_attention_norm": (0,)},
        windowed=_modernbert_windows,
        unused=("head.", "decoder."),
        classifier=(Dense("head.dense", "gelu", bias=False, norm="head.norm"), Dense("classifier")),
        modules={
            "embedding": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm",
            "norm": "final_norm",
        } | in_layers(
            "layers.*.", attention_norm="attn_norm", qkv="attn.Wqkv", output="attn.Wo",
            feed_forward_norm="mlp_norm", up="mlp.Wi", down="mlp.Wo"),
    ),
    "nomic_bert": Family(
        architectures=_architectures("NomicBert"),
        shape=(30528, 768, 3072, 12, 12, None, 2048), tokens=(None, None),
        defaults=ROPE | {"rms_norm_eps": 1e-12, "type_vocab_size": 2, "rope_theta": 1000.0},
        names={"rms_norm_eps": "layer_norm_epsilon|layer_norm_eps", "hidden_size": "n_embd",
               "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
               "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
               "rope_theta": "rotary_emb_base"},
        only=_NOT_CAUSAL | {
            "activation_function": ("swiglu",), "hidden_act": ("silu",), "prenorm": (False,),
            "rotary_emb_fraction": (1, 1.0), "rotary_scaling_factor": (None,),
            "rotary_emb_interleaved": (False,), "parallel_block": (False,), "causal": (False,),
            "use_rms_norm": (False, None), "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,),
            "mlp_fc2_bias": (False,)},
        fields=_POST_NORM | {"feed_forward": "swiglu"},
        prefixes=("nomic_bert.", "bert."), unused=("pooler.", "cls."),
        classifier=_BERT_CLASSIFIER,
        modules=_BERT_MODULES | {"embedding_norm": "emb_ln"} | in_layers(
            "encoder.layers.*.", qkv="attn.Wqkv", output="attn.out_proj", attention_norm="norm1",
            up=stacked("mlp.fc12", "mlp.fc11"), down="mlp.fc2", feed_forward_norm="norm2"),
    ),
}
# fmt: on
