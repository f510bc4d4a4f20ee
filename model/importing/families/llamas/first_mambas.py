"""The published decoders with Mamba's first version, as those in `recurrent.py` are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir.model.importing.families.family import Family
from kvasir.model.importing.families.llamas import experts as e
from kvasir.model.importing.families.llamas import traits as t
from kvasir.model.importing.families.llamas.mambas import ALONE, every
from kvasir.model.importing.families.llamas.recurrent import MOST_STEPS
from kvasir.model.importing.families.options import Options
from kvasir.model.importing.tensors import all_ones, stacked

_MAMBA = {"input": "in_proj", "convolution": "conv1d", "selection": "x_proj", "output": "out_proj"}
_MAMBA |= {"step_up": "dt_proj", "step_bias": "dt_proj", "log_decay": "A_log", "skip": "D"}


def _mamba(
    layers: Callable[[Options], tuple[int, ...]],
    place: str,
    *,
    width: str | None = None,
    norm_eps: str | None = None,
) -> t.Trait:
    """Return the trait of Mamba's first version in some layers, with its modules at a place.

    width: the key that may say how many channels there are, in the place of mamba_expand. norm_eps:
    that of the norms' epsilon, where steps, keys and queries are normalised.
    """

    def recurrence(options: Options) -> dict[str, Any] | None:
        if not layers(options):
            return None
        d_model = options.whole("hidden_size")
        channels, rank = d_model * options.whole("mamba_expand", most=MOST_STEPS), -(-d_model // 16)
        if width is not None and options[width] is not None:
            channels = options.whole(width)
        if options["mamba_dt_rank"] != "auto":
            rank = options.whole("mamba_dt_rank")
        return {
            "kind": "mamba",
            "kernel": options.whole("mamba_d_conv", least=2, most=MOST_STEPS),
            "d_inner": channels,
            "d_state": options.whole("mamba_d_state", most=MOST_STEPS),
            "step_rank": rank,
            "inner_norm_eps": norm_eps and options.number(norm_eps),
            "bias": options["mamba_proj_bias"],
            "convolution_bias": options["mamba_conv_bias"],
        }

    keys = {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": "auto"}
    keys |= {"proj_bias": False, "conv_bias": True}
    return {
        "keys": {f"mamba_{key}": value for key, value in keys.items()},
        "only": {"hidden_act": ("silu",)},
        "fields": {"recurrence": recurrence, "recurrent_layers": layers},
        "layers": {f"recurrence.{ours}": f"{place}.{name}" for ours, name in _MAMBA.items()},
    }


def _all_but(key: str) -> Callable[[Options], tuple[int, ...]]:
    """Return the function that returns the layers that a period and an offset do not name."""

    def layers(options: Options) -> tuple[int, ...]:
        period = options.whole(f"{key}_period")
        first = options.whole(f"{key}_offset", least=0, most=period - 1)
        return tuple(layer for layer in t.every_layer(options) if layer % period != first)

    return layers


def _of_experts(key: str) -> Callable[[Options], int | None]:
    """Return the function that reads a number of models with several experts."""
    return lambda options: options.whole(key) if options.whole("num_experts") > 1 else None


# fmt: off
_FIRST: t.Trait = {
    "keys": {"tie_word_embeddings": True},
    "names": {"mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel",
              "mamba_expand": "expand", "mamba_dt_rank": "time_step_rank",
              "mamba_proj_bias": "use_bias", "mamba_conv_bias": "use_conv_bias",
              "rms_norm_eps": "layer_norm_epsilon"}}
FIRST_MAMBAS: dict[str, Family] = {
    "mamba": t.llama(
        "Mamba", (50280, 768, None, 32, 1, None, 32768), (0, 0), ALONE, _FIRST,
        _mamba(every, "mixer", width="intermediate_size")),
    "falcon_mamba": t.llama(
        "FalconMamba", (50280, 768, None, 32, 1, None, 32768), (0, 0), ALONE, _FIRST,
        _mamba(every, "mixer", width="intermediate_size", norm_eps="mixer_rms_eps"),
        keys={"mixer_rms_eps": 1e-6},
        layers={f"recurrence.{part}_norm": all_ones() for part in ("step", "key", "query")}),
    "jamba": t.llama(
        "Jamba", (65536, 4096, 14336, 32, 32, 8, 262144), (1, 2),
        e.experts(16, 2, router="feed_forward.router", parts="feed_forward.experts.#.{}_proj"),
        _mamba(_all_but("attn_layer"), "mamba", norm_eps="rms_norm_eps"),
        without=tuple(t.ROPE), norm="final_layernorm",
        keys={"attn_layer_period": 8, "attn_layer_offset": 4,
              "expert_layer_period": 2, "expert_layer_offset": 1},
        fields={"position": "none", "n_experts": _of_experts("num_experts"),
                "n_experts_per_token": _of_experts("num_experts_per_tok"),
                "d_expert": _of_experts("intermediate_size"),
                "dense_layers": lambda options: _all_but("expert_layer")(options)
                if options.whole("num_experts") > 1 else ()},
        layers={"feed_forward_norm": "pre_ff_layernorm", "down": "feed_forward.down_proj",
                "up": stacked("feed_forward.gate_proj", "feed_forward.up_proj"),
                "recurrence.step_norm": "mamba.dt_layernorm",
                "recurrence.key_norm": "mamba.b_layernorm",
                "recurrence.query_norm": "mamba.c_layernorm"}),
}
# fmt: on
