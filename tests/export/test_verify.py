"""The rows that the exporter measures on begin as served texts do."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tokenizers import processors
from torch.nn import functional

from kvasir.export.verification import plan
from kvasir.export.verification.plan import Plan, SampleText
from kvasir.export.verification.samples import sample_text
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.tally import Tally
from kvasir.export.verification.verify import (
    MAX_LOGIT_ERROR,
    VerificationError,
    Verifier,
    check,
)
from kvasir.model.checkpoint import Checkpoint
from kvasir.model.directory import GRAPH_FILE, WEIGHTS_FILE
from kvasir.model.records import Verification
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.random_models import (
    RandomModel,
    export_decoder,
    export_random,
    make_config,
    make_decoder,
)
from tests.model.variants import VARIANTS

TEXT = np.random.default_rng(5).integers(10, 300, size=500)


def perplexity(model: RandomModel, rows: list[list[int]], first: int) -> float:
    """Return that of the rows' tokens from `first` on, in PyTorch."""
    losses = []
    with torch.inference_mode():
        for row in rows:
            logits = model.decoder(torch.tensor([row[:-1]]))[0, first - 1 :]
            losses.append(functional.cross_entropy(logits, torch.tensor(row[first:])).item())
    return math.exp(np.mean(losses))


@pytest.mark.parametrize(("name", "prefix"), [("random_model", (7, 9)), ("random_int8_model", ())])
def test_every_row_begins_with_what_the_tokenizer_puts_before_a_text(
    name: str, prefix: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """A row from the middle has no BOS, unlike the texts that a decoder is trained and used on."""
    model: RandomModel = request.getfixturevalue(name)
    text = SampleText("text", TEXT, prefix)
    of_text = Plan(model.config, text)
    for row in of_text.rows:
        assert row.tolist()[: len(prefix)] == list(prefix)
    for test in of_text.tests:
        for place, run in zip(test.places, test.case.rows, strict=True):
            assert (of_text.rows[place][: len(run)] == run).all()
    figures = model.verify(text)
    step = 128 - len(prefix)
    half = TEXT[: len(TEXT) // 2]
    n_rows = (len(half) - 1) // step
    rows_of_text = [[*prefix, *half[i * step : (i + 1) * step + 1]] for i in range(n_rows)]
    expected = perplexity(model, rows_of_text, first=33)
    assert figures.text == f"text, {n_rows} x 128 tokens"
    assert figures.perplexity_torch == pytest.approx(expected, rel=1e-4)
    assert figures.perplexity_onnx == pytest.approx(
        figures.perplexity_torch, rel=1e-4 if name == "random_model" else 0.1
    )
    wanted = sum(len(step.wanted) for test in of_text.tests for step in test.case.steps)
    assert figures.positions == wanted > 96 * n_rows


@pytest.mark.parametrize("n_parameters", [10**6, 135 * 10**6, 8 * 10**9])
def test_the_tokens_of_a_large_model_are_few_and_still_enough(
    n_parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "count_parameters", lambda _: n_parameters)
    of_model = Plan(make_config(max_model_len=8192), SampleText("text", np.resize(TEXT, 50_000)))
    n_tokens = sum(len(row) - 1 for row in of_model.rows)
    assert n_tokens * n_parameters < max(5e11, 3000 * n_parameters)
    assert of_model.longest == 2048
    decoded = [step for step in of_model.tests[-1].case.steps if step.decode]
    assert sum(len(step.wanted) for step in decoded) > 500


@pytest.mark.parametrize(
    ("window", "longest"), [(100, 2048), (2048, 2056), (4096, 4104), (10**5, 4104)]
)
def test_a_long_row_reaches_beyond_a_window(window: int, longest: int) -> None:
    config = make_config(max_model_len=8192, sliding_window=window)
    assert Plan(config, None).longest == longest


@pytest.mark.parametrize("n_tokens", [256, 300, 2000, 20_000])
def test_long_rows_are_of_text_that_perplexity_is_not_measured_on(n_tokens: int) -> None:
    """Keys and values are scaled by them: a text too short gives shorter ones."""
    text = np.arange(n_tokens)
    of_text = Plan(make_config(max_model_len=512), SampleText("text", text, (-1, -2)))
    long_rows = [of_text.rows[place] for place in of_text.long_rows]
    others = [row for i, row in enumerate(of_text.rows) if i not in of_text.long_rows]
    for row in of_text.rows:
        assert row[:2].tolist() == [-1, -2]
        assert (np.diff(row[2:]) == 1).all()
    assert min(row[2] for row in long_rows) > max(row[-1] for row in others)
    assert long_rows[-1][-1] == n_tokens - 1
    assert sum(map(len, long_rows)) > min(n_tokens // 2, 8 * 512) / 2


@pytest.mark.parametrize("n_tokens", [2, 5])
def test_a_prefix_is_cut_where_a_row_cannot_hold_it(
    n_tokens: int, random_model: RandomModel
) -> None:
    text = SampleText("text", TEXT[:n_tokens], tuple(range(300)))
    assert random_model.verify(text).perplexity_torch is not None


def turn_wrongly(graph: onnx.GraphProto, first: int) -> None:
    """Give positions from `first` on the angles of position 0."""
    for tensor in graph.initializer:
        if "rotary" in tensor.name:
            table = onnx.numpy_helper.to_array(tensor).copy()
            table[first:] = table[0]
            tensor.CopyFrom(onnx.numpy_helper.from_array(table, tensor.name))


def narrow(graph: onnx.GraphProto, window: int) -> None:
    """Hide the keys beyond a window, in prompts and in decoding."""
    choices = (node for node in graph.node if node.op_type == "If")
    for node in (node for choice in choices for of in choice.attribute for node in of.g.node):
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(onnx.helper.make_attribute("local_window_size", window))


def test_a_graph_that_is_wrong_beyond_some_position_is_refused(tmp_path: Path) -> None:
    """Perplexity is measured on short rows, and would not move."""
    text, precision = SampleText("text", np.resize(TEXT, 3000)), "int4"
    model = export_random(tmp_path, precision, max_model_len=640)
    right = model.verify(text)
    assert right.longest == 640
    right = right.model_copy(update={"perplexity_torch": right.perplexity_onnx})
    check(right, precision)
    for break_it, position in ((turn_wrongly, 450), (narrow, 150)):
        proto = onnx.load(model.graph)
        break_it(proto.graph, position)
        broken = tmp_path / break_it.__name__ / GRAPH_FILE
        broken.parent.mkdir()
        onnx.save(proto, broken, save_as_external_data=True, location=WEIGHTS_FILE)
        wrong = RandomModel(model.decoder, broken).verify(text)
        assert wrong.perplexity_onnx == right.perplexity_onnx
        wrong = wrong.model_copy(update={"perplexity_torch": wrong.perplexity_onnx})
        with pytest.raises(VerificationError, match="in rows of 640 tokens"):
            check(wrong, precision)


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "<s> <s> $A"])
def test_the_prefix_is_found_in_the_tokenizer(template: str, tmp_path: Path) -> None:
    content = "<s> the same text, again and again: " * 40
    tokenizer = train_tokenizer([content], 280)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    plain = tokenizer.encode(content).ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    (tmp_path / "text.txt").write_text(content)
    checkpoint = Checkpoint(tmp_path, make_config(), {}, tokenizer, {})
    sample = sample_text(checkpoint, tmp_path / "text.txt", "int8")
    assert sample is not None
    assert sample.token_ids.tolist() == plain
    assert sample.prefix == (special[0][1],) * template.split("$A", maxsplit=1)[0].count("<s>")


@pytest.mark.parametrize(("precision", "loss", "figures", "is_refused"), [
    ("int8", 0.009, {}, False),
    ("int8", 0.011, {}, True),
    ("int8", 0.03, {"perplexity_error": 0.011}, False),  # of so few tokens it may be below 1 %
    ("int8", 0.03, {"perplexity_error": 0.009}, True),
    ("int8", 0.07, {"perplexity_error": 1.0}, True),  # a broken graph, whose losses vary wildly
    ("int8", 0.0, {"perplexity_error": math.nan}, True),
    ("int8", 0.0, {"mean_kl": 0.009}, False),
    ("int8", 0.0, {"mean_kl": 0.019}, True),  # one likeliest token of eight is another
    ("int8", 0.0, {"mean_kl": math.nan}, True),
    ("int4", 0.0, {"mean_kl": 0.05}, False),
])  # fmt: skip
def test_a_loss_and_a_divergence_are_refused_beyond_doubt(
    precision: str, loss: float, figures: dict[str, float], is_refused: bool
) -> None:
    measured = Verification(
        max_logit_error=0.3,
        greedy_agreement=0.9,
        perplexity_torch=5.0,
        perplexity_onnx=5.0 * (1.0 + loss),
    ).model_copy(update=figures)
    with pytest.raises(VerificationError) if is_refused else contextlib.nullcontext():
        check(measured, precision)


@pytest.mark.parametrize("n_tokens", [40000, 3000])
def test_weights_are_rounded_by_text_that_nothing_else_is_measured_on(n_tokens: int) -> None:
    """Where there is enough: else by the long rows."""
    config, text = make_config(n_layer=1), SampleText("counting", np.arange(n_tokens))
    of_text = Plan(config, text, calibrates=True)
    chosen = {int(token) for place in of_text.calibrated for token in of_text.rows[place]}
    assert len(chosen) > 1000
    measured = {
        int(token)
        for place in range(len(of_text.rows))
        for token in of_text.rows[place]
        if place not in of_text.calibrated
    }
    assert (of_text.calibrated == of_text.long_rows) == (n_tokens == 3000)
    if n_tokens > 3000:
        assert not chosen & measured
    assert len(Plan(config, text).rows) < len(of_text.rows) or n_tokens == 3000


def test_an_fp32_graph_may_be_as_far_as_pytorch_is_from_float64(tmp_path: Path) -> None:
    """Large weights make sums of float32 differ by more than 0.1 %, in PyTorch as in a graph."""
    decoder = make_decoder(make_config(**VARIANTS["gpt2"]))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(64 if parameter.dim() > 1 else 1)
    model = export_decoder(decoder, tmp_path)
    verifier = Verifier(model.config, decoder.state_dict())
    figures = verifier.verify(SegmentedGraph(model.graph, model.config).logits)
    noise = verifier.float32_error()
    assert noise > MAX_LOGIT_ERROR
    with pytest.raises(VerificationError):
        check(figures, "fp32")
    check(figures, "fp32", noise)
    with pytest.raises(VerificationError):
        check(figures.model_copy(update={"max_logit_error": 5 * noise}), "fp32", noise)


def test_float64_finds_nothing_wrong_with_small_sums() -> None:
    decoder = make_decoder(make_config(n_layer=1))
    verifier = Verifier(decoder.config, decoder.state_dict())
    verifier.compute()
    assert 0.0 < verifier.float32_error() < 1e-4


def test_the_error_of_a_perplexity_is_that_of_its_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(40, 50, generator=generator)
    actual = expected + 0.1 * torch.randn(40, 50, generator=generator)
    labels = torch.arange(40)
    tally = Tally()
    tally.add(expected[:15], actual[:15], labels[:15], [(False, 0)] * 15, [(0, 0)] * 15)
    tally.add(expected[15:], actual[15:], labels[15:], [(False, 0)] * 25, [(0, 0)] * 25)
    before, after = (
        torch.tensor([-logits[i].log_softmax(0)[i] for i in range(40)])
        for logits in (expected, actual)
    )
    wanted = ((after - before).std(correction=0) / 40**0.5).item()
    assert tally.figures()["perplexity_error"] == pytest.approx(wanted, rel=1e-4)


def test_divergences_are_those_of_their_definition() -> None:
    generator, shape = np.random.default_rng(0), (300, 70)
    expected = generator.normal(scale=3.0, size=shape)
    errors = generator.normal(scale=10.0 ** -generator.integers(1, 4, size=(300, 1)), size=shape)
    actual, labels = torch.tensor(expected + errors).float(), torch.arange(300) % 70
    tally = Tally()
    tally.add(torch.tensor(expected).float(), actual, labels, [(False, 0)] * 300, [(0, 0)] * 300)
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (expected, expected + errors))
    by_definition = (p * np.log(p / q)).sum(axis=1)
    figures = tally.figures()
    assert figures["mean_kl"] == pytest.approx(by_definition.mean(), rel=1e-4)
    assert figures["kl_99"] == pytest.approx(np.quantile(by_definition, 0.99), rel=1e-4)
