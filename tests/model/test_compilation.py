"""Sums over parts of logits, attention and compiled blocks, against what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn import functional

from kvasir.model.network import gradients as own_gradients
from kvasir.model.network.gradients import attend_causally
from kvasir.model.network.transformer import Transformer
from kvasir.model.training.compilation import is_worth
from kvasir.model.training.data.corpus import Corpus
from kvasir.model.training.data.tokens import TokenData, write_tokens
from kvasir.model.training.objectives import _cross_entropy
from kvasir.model.training.trainer import Trainer
from tests.kit.random_models import make_config
from tests.model.test_trainer import (
    CONTEXT,
    SETTINGS,
    TEXTS,
    Recorder,
    make_trainer,
    press_ctrl_c,
    resume,
    tokenizer,
)
from tests.model.variants import VARIANTS

# PyTorch's compiler uses what PyTorch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def data(tmp_path: Path) -> TokenData:
    corpus = Corpus(TEXTS, 0)
    return write_tokens(corpus, tokenizer, tmp_path / "data", held_out=0.3, context=CONTEXT)


def gradients(network: Transformer, loss: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    (loss / 7).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False, "head_bias": True}, {"logit_softcap": 0.1}],
)
def test_a_sum_over_parts_is_the_sum_over_all(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with a last part that is shorter, and targets that do not count."""
    monkeypatch.setattr(own_gradients, "_PART", 5)
    torch.manual_seed(0)
    network = Transformer(make_config(**changes)).double()
    ids = torch.randint(300, (3, 6))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(3, 6) < 0.3, -100)

    def measure(logits: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(logits, wanted, reduction="sum", label_smoothing=0.1)

    whole = measure(network(ids).flatten(0, 1), targets.flatten())
    in_parts = network(ids, targets=targets, measure=measure)
    torch.testing.assert_close(in_parts.double(), whole, rtol=1e-6, atol=0)
    ours, expected = gradients(network, in_parts), gradients(network, whole)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-8, atol=1e-12, msg=name)
    with torch.no_grad():
        again = network(ids, targets=targets, measure=lambda *given: measure(*given).repeat(2))
    torch.testing.assert_close(again, whole.repeat(2))


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_gradients, "_PART", 5)
    network, heights = Transformer(make_config()), list[int]()
    project = network._logits
    network._logits = lambda normed: heights.append(len(normed)) or project(normed)  # type: ignore[method-assign, func-returns-value]
    ids = torch.zeros(2, 6, dtype=torch.long)
    network(ids, targets=ids, measure=_cross_entropy).backward()
    assert heights == [5, 5, 2]


COMPILED = replace(SETTINGS, steps=4, checkpoint_every=2, evaluate_every=2, compile=True)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """Forget what was compiled; a process that compiled beside this one would load PyTorch."""
    torch._dynamo.reset()
    counters.clear()
    with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        yield


def compiled(trainer: Trainer) -> Trainer:
    assert trainer.compile() == ""
    return trainer


def test_compiled_runs_are_plain_ones_but_for_rounding_and_resume_to_their_bits(
    data: TokenData,
    tmp_path: Path,
) -> None:
    """One layer is recurrent, and one of attention; each is compiled once for all three runs."""
    changes = VARIANTS["bamba"] | {"n_layer": 2, "recurrent_layers": (0,), "dropout": 0.2}
    changes |= {"layers_without_feed_forward": (0,)}
    settings = replace(COMPILED, mixed_precision=False)
    plain, whole, first, rest = (Recorder() for _ in range(4))
    folders = [tmp_path / name for name in ("plain", "whole", "parts")]
    for folder in folders:
        folder.mkdir()
    make_trainer(data, settings, **changes).train(folders[0], plain)
    compiled(make_trainer(data, settings, **changes)).train(folders[1], whole)
    assert counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(whole.losses, plain.losses, rtol=1e-5, atol=0)
    first.at = {2: press_ctrl_c}
    compiled(make_trainer(data, settings, **changes)).train(folders[2], first)
    compiled(resume(folders[2], data)).train(folders[2], rest)
    assert first.losses + rest.losses == whole.losses


def test_what_cannot_be_compiled_is_trained_without(
    data: TokenData,
    tmp_path: Path,
) -> None:
    settings = replace(COMPILED, mixed_precision=False)
    small = {"layers_without_feed_forward": (0,)}
    trainer, plain, other = make_trainer(data, settings, **small), Recorder(), Recorder()
    with config.patch({"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}):
        assert "no-such-compiler" in trainer.compile()
    trainer.train(tmp_path, other)
    (tmp_path / "plain").mkdir()
    make_trainer(data, settings, **small).train(tmp_path / "plain", plain)
    assert other.losses == plain.losses


def test_short_runs_and_experts_are_not_worth_compiling() -> None:
    dense, experts = make_config(), make_config(**VARIANTS["qwen3 mixture"])
    assert is_worth(Transformer(dense), 1e14)
    assert not is_worth(Transformer(dense), 1e13)
    assert not is_worth(Transformer(experts), 1e14)


def attended(attend: Callable[..., Tensor], heads: list[Tensor], outer: Tensor) -> list[Tensor]:
    """Return what is attended, and the gradients of query, key and value."""
    leaves = [part.clone().requires_grad_() for part in heads]
    made = attend(*leaves, scale=0.4)
    return [made, *torch.autograd.grad(made, leaves, outer)]


operator = partial(functional.scaled_dot_product_attention, is_causal=True)


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_attention_in_blocks_and_its_gradients_are_those_of_pytorchs_operator(
    n_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    *heads, outer = (torch.randn((2, 3, n_tokens, 8), generator=generator) for _ in range(4))
    expected = attended(operator, heads, outer)
    for found, wanted in zip(attended(attend_causally, heads, outer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_attention_of_16_bits_is_as_near_as_that_of_pytorchs_operator() -> None:
    """Where scores are large, too, which must not be rounded to 8 bits."""
    torch.manual_seed(0)
    *heads, outer = (torch.randn(2, 3, 200, 16).bfloat16() for _ in range(4))
    heads[0] *= 9
    exact = attended(operator, [part.double() for part in heads], outer.double())
    found, others = (attended(one, heads, outer) for one in (attend_causally, operator))
    for one, other, wanted in zip(found, others, exact, strict=True):
        assert (one.double() - wanted).norm() < 1.5 * (other.double() - wanted).norm()
