"""The model view: it shows GET /model, and draws and counts any decoder correctly."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import EXAMPLE
from tests.browser.playground import CARD

COUNT = """async (config) => {
  const { parametersOf } = await import("./static/model/parameters.js");
  return parametersOf(config).reduce((sum, [, count]) => sum + count, 0);
}"""
DRAW = """async (config) => {
  const { drawArchitecture } = await import("./static/model/architecture.js");
  const drawing = drawArchitecture(config);
  const count = (name) => drawing.querySelectorAll(`.${name}`).length;
  return ["plus", "norm", "query", "key-value"].map(count);
}"""
# GPT-2 small and Qwen2.5 0.5B have published sizes. Tied embeddings count once.
SIZES = (
    *("vocab_size", "max_model_len", "n_layer", "n_head", "n_kv_head"),
    *("head_dim", "d_model", "d_ff"),
)
GPT2: dict[str, Any] = dict(
    zip(SIZES, (50257, 1024, 12, 12, 12, 64, 768, 3072), strict=True)
) | dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)
GPT2 |= {"position": "learned", "norm": "layernorm", "feed_forward": "gelu_tanh"}
QWEN = dict(zip(SIZES, (151936, 2048, 24, 14, 2, 64, 896, 4864), strict=True)) | {"qkv_bias": True}
# Qwen3-30B-A3B without its norms of heads.
QWEN3_MOE = dict(zip(SIZES, (151936, 40960, 48, 32, 4, 128, 2048, 6144), strict=True))
QWEN3_MOE |= {"n_experts": 128, "n_experts_per_token": 8, "d_expert": 768, "tied_embeddings": False}
V3: dict[str, Any] = dict(zip(SIZES, (129280, 163840, 61, 128, 1, 576, 7168, 18432), strict=True))
V3 |= {"latents": {"rank": 512, "key_dim": 128, "value_dim": 128, "query_rank": 1536}}
V3 |= {"rotary_dim": 64, "n_experts": 256, "n_experts_per_token": 8, "d_expert": 2048}
V3 |= {"d_shared_expert": 2048, "choice_bias": "scores", "dense_layers": [0, 1, 2]}
V3 |= {"n_expert_groups": 8, "n_groups_per_token": 4, "tied_embeddings": False}
# Small networks with features of few families, whose parameters PyTorch has counted.
SHAPE = dict(zip(SIZES, (300, 96, 2, 4, 2, 16, 48, 96), strict=True))
GROUPED: dict[str, Any] = {"router": "sigmoid", "choice_bias": "scores", "dense_layers": [0]}
GROUPED |= {"d_model": 64, "n_experts": 6, "n_experts_per_token": 3, "d_expert": 32}
GROUPED |= {"d_shared_expert": 48, "shared_expert_gate": True, "qk_norm": True}
BIASED: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)
BIASED |= {"n_layer": 1, "n_kv_head": 4, "norm": "layernorm", "feed_forward": "relu2"}
BIASED |= {"qk_norm": True, "qk_norm_kind": "layernorm"}
LEARNED = {"norm_placement": "output", "qk_norm": True, "qk_norm_across_heads": True}
NORMED: dict[str, Any] = {"mixture_norm": True, "qk_norm": True, "layers_without_qk_norm": [1]}
DELTA: dict[str, Any] = {"recurrent_layers": [0], "attention_gate": True}
DELTA |= {"qkv_bias": True}
DELTA["recurrence"] = {"kind": "delta_rule", "kernel": 4, "n_head": 4, "n_key_head": 2}
DELTA["recurrence"] |= {"key_dim": 8, "value_dim": 24, "doubled_rates": True}
LATENTS = {"rank": 16, "key_dim": 8, "value_dim": 12, "query_rank": None}
CHANNELS: dict[str, Any] = {"n_kv_head": 1, "head_dim": 24, "rotary_dim": 8, "latents": LATENTS}
CHANNELS |= {"position": "none", "recurrent_layers": [0]}
CHANNELS["recurrence"] = {"kind": "delta_rule", "kernel": 3, "n_head": 3, "n_key_head": 3}
CHANNELS["recurrence"] |= {"key_dim": 8, "value_dim": 16, "decays_by_channel": True, "rank": 16}
LING: dict[str, Any] = CHANNELS | {"position": "rotary", "head_dim": 32, "rotary_dim": 16}
LING |= {"attention_gate": True, "attention_gate_by_head": True}
LING["recurrence"] = {"kind": "delta_rule", "kernel": 3, "n_head": 4, "n_key_head": 2}
LING["recurrence"] |= {"key_dim": 24, "value_dim": 8, "decays_by_channel": True, "rank": None}
CONVOLUTIONS: dict[str, Any] = {"n_layer": 4, "recurrent_layers": [0, 2], "qk_norm": True}
CONVOLUTIONS["recurrence"] = {"kind": "short_convolution", "kernel": 3, "bias": True}
MAMBA2: dict[str, Any] = {"kind": "mamba2", "kernel": 3, "n_head": 4, "head_dim": 12}
MAMBA2 |= {"d_state": 16, "n_group": 2, "bias": True, "convolution_bias": True, "normed": True}
MAMBA = {"kind": "mamba", "kernel": 4, "d_inner": 96, "d_state": 8, "step_rank": 6}
MAMBA |= {"bias": True, "convolution_bias": True, "inner_norm_eps": 0.1}
BESIDE = {"recurrent_layers": [0, 1], "recurrence_beside_attention": True}
UNFED = {"recurrent_layers": [0], "recurrence": MAMBA2, "layers_without_feed_forward": [0]}
SMALL = [
    ({"recurrent_layers": [0], "recurrence": MAMBA2}, 62_400),
    ({"recurrent_layers": [0], "recurrence": MAMBA}, 69_718),
    (BESIDE | {"recurrence": MAMBA2 | {"normed": False}}, 82_416),
    (UNFED, 48_528),
    (GROUPED | NORMED, 109_222),
    (DELTA, 71_056),
    (CHANNELS, 60_187),
    (LING, 66_732),
    (CONVOLUTIONS, 107_952),
    (GROUPED, 109_254),
    (BIASED, 36_832),
    (LEARNED | {"feed_forward": "xielu", "qkv_clip": 0.7}, 51_956),
]


@pytest.fixture
def card(page: Page, url: str) -> dict[str, Any]:
    page.locator("header a[href='#model']").click()
    expect(page.locator("#model")).to_be_visible()
    model_card: dict[str, Any] = page.request.get(f"{url}/model").json()
    return model_card


def test_it_shows_and_draws_the_model_card(page: Page, card: dict[str, Any]) -> None:
    expect(page.locator("#model-title")).to_have_text(f"Model: {card['model']}")
    size = sum(file["bytes"] for file in card["files"])
    expect(page.locator("[data-fact=size]")).to_contain_text(f"({size:,} bytes)")
    expect(page.locator("[data-fact=agreement]")).to_have_text(
        f"{card['verification']['greedy_agreement']:.1%}".replace("%", " %")
    )
    expect(page.locator("[data-fact=perplexity-torch]")).to_have_text(
        f"{card['verification']['perplexity_torch']:.3f}"
    )
    expect(page.locator("[data-fact=budget]")).to_contain_text(
        f"{card['kv_cache']['budget_tokens']:,} tokens"
    )
    shown = page.locator("#model-versions dd").all_text_contents()
    assert shown == list(card["versions"].values())
    lines = page.locator("#hashes").text_content() or ""
    assert lines.count("\n") + 1 == len(card["files"])
    check = ["sha256sum", "--check", "--strict"]
    subprocess.run(check, input=f"{lines}\n", text=True, cwd=EXAMPLE, check=True)
    drawing = page.locator("#architecture")
    expect(drawing).to_contain_text(f"{card['config']['n_layer']} layers")
    expect(drawing).to_contain_text(f"sharing {card['config']['n_kv_head']} key-value heads")
    assert "list" in drawing.aria_snapshot()


def test_parts_add_up_to_the_parameters(page: Page, card: dict[str, Any]) -> None:
    expect(page.locator("#parameters-sum")).to_have_text(f"{card['parameters']:,}")
    expect(page.locator("#parameters-differ")).to_be_hidden()
    like = card["config"]
    assert page.evaluate(COUNT, like | GPT2) == 124_439_808
    assert page.evaluate(COUNT, like | QWEN) == 494_032_768
    assert page.evaluate(COUNT, like | QWEN3_MOE) == 30_532_122_624 - 48 * 2 * 128
    assert page.evaluate(COUNT, like | V3) == 671_026_419_200
    for changes, n_parameters in SMALL:
        assert page.evaluate(COUNT, like | SHAPE | changes) == n_parameters


def test_experts_and_latents_are_drawn_and_counted(
    open_page: Callable[..., Page], url: str, check_looks: Callable[[Page, str], None]
) -> None:
    """DeepSeek-V3's shape: 256 experts of which 8 are a token's, one of all, 576 cached numbers."""

    def answer(route: Route) -> None:
        card = route.fetch().json()
        card["config"] |= V3
        card["kv_cache"]["bytes_per_token"] = 61 * (576 + 4)  # a scale for each token
        route.fulfill(json=card | {"parameters": 671_026_419_200})

    page = open_page(f"{url}/#model", prepare=lambda page: page.route(CARD, answer))
    drawing = page.locator("#architecture")
    for name, count in {"expert": 256, "chosen": 8, "shared": 1, "query": 128, "latent": 1}.items():
        expect(drawing.locator(f"i.{name}")).to_have_count(count)
    latent, turned = (drawing.locator(f"i.{name}").bounding_box() for name in ("latent", "turned"))
    assert latent is not None
    assert turned is not None
    assert latent["width"] / turned["width"] == pytest.approx(512 / 64, rel=0.1)
    for words in ("Latent attention", "128 query heads of 192 channels", "from 4 of 8 groups"):
        expect(drawing).to_contain_text(words)
    expect(page.locator("[data-fact=token]")).to_contain_text("512 of the latent + 64 turned")
    expect(page.locator("[data-fact=token]")).to_contain_text("1.007 bytes")
    expect(page.locator("#parameters-differ")).to_be_hidden()
    check_looks(page, "latents")


def test_a_wrong_number_of_parameters_is_reported(open_page: Callable[..., Page], url: str) -> None:
    def answer(route: Route) -> None:
        wrong = route.fetch().json()
        route.fulfill(json=wrong | {"parameters": wrong["parameters"] + 1})

    page = open_page(f"{url}/#model", prepare=lambda page: page.route(CARD, answer))
    expect(page.locator("#parameters-differ")).to_be_visible()


DRAWINGS: list[tuple[dict[str, Any], int, int]] = [  # changes, sums and norms
    ({"norm_placement": "pre"}, 2, 3),
    ({"norm_placement": "post"}, 2, 2),
    ({"norm_placement": "both"}, 2, 5),
    ({"norm_placement": "output"}, 2, 3),
    ({"norm_placement": "output_of_attention"}, 2, 3),
    ({"embedding_norm": True}, 2, 4),
    ({"parallel_residual": True}, 1, 3),
    ({"layers_without_feed_forward": [*range(99)]}, 1, 2),
]


def test_residuals_and_norms_are_drawn(modules: Page, url: str) -> None:
    """Norms of a layer are drawn once; a final norm follows, except after post-norm layers."""
    config = modules.request.get(f"{url}/model").json()["config"] | {"n_head": 12, "n_kv_head": 3}
    for changes, sums, norms in DRAWINGS:
        assert modules.evaluate(DRAW, config | changes) == [sums, norms, 12, 3], changes
