"""Text that weights are rounded by: of one's own, and what is no such text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import onnx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvasir.export.verification.samples import sample_calibration
from kvasir.model.checkpoint import load_checkpoint, save_checkpoint
from kvasir.model.directory import (
    CHAT_TEMPLATE_FILE,
    GRAPH_FILE,
    WEIGHTS_FILE,
    load_model_dir,
)
from kvasir.model.network.skeleton import parameter_shapes
from kvasir.model.tokenizer import train_tokenizer
from tests.export.runs import TEXT, save_run
from tests.kit.commands import kvasir
from tests.kit.random_models import make_config, make_decoder
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run")


def test_calibration_is_on_text_of_ones_own_or_left_out(run: Path, tmp_path: Path) -> None:
    text, options = tmp_path / "text.txt", ("export", run, "--precision", "int8", "--out")
    text.write_text(TEXT[5000:12000])
    kvasir(*options, tmp_path / "own", "--calibrate", text)
    kvasir(*options, tmp_path / "none", "--no-calibration")
    own, none = (load_model_dir(tmp_path / name).manifest for name in ("own", "none"))
    assert none.calibration is None
    assert own.calibration is not None
    assert own.calibration["text"] == "text.txt"
    assert int(own.calibration["tokens"]) >= 1000
    for wrong in (["--precision", "fp32"], ["--no-calibration"]):
        told = kvasir(*options, tmp_path / "no", "--calibrate", text, *wrong, fails=True)
        assert "text.txt is for rounding weights" in told
    for content, problem in (
        (b"", "text.txt has 0 tokens, too few to calibrate on"),
        (b"a few words", "tokens, too few to calibrate on"),
        (b"\xff", "text.txt is not UTF-8"),
    ):
        text.write_bytes(content)
        assert problem in kvasir(*options, tmp_path / "no", "--calibrate", text, fails=True)
    assert not (tmp_path / "no").exists()


def test_int4_keeps_some_matrices_in_8_bits_within_its_size(run: Path, tmp_path: Path) -> None:
    """Those that the manifest names, and none at the fewest bits."""
    options = ("export", run, "--precision", "int4", "--no-int8-prompts", "--out")
    kept, sizes = dict[str, set[str]](), dict[str, int]()
    for name, bits in {"more": "6.5", "fewest": "4.5"}.items():
        kvasir(*options, out := tmp_path / name, "--bits", bits)
        kept[name] = set(load_model_dir(out).manifest.in_8_bits)
        stored = onnx.load(out / GRAPH_FILE, load_external_data=False).graph.initializer
        in_8_bits = {of.name for of in stored if of.data_type == onnx.TensorProto.INT8}
        assert in_8_bits == {f"{of}.T.int8" for of in kept[name]} | {"embedding.weight.int8"}
        sizes[name] = (out / WEIGHTS_FILE).stat().st_size
    assert 0 < len(kept["more"]) < 4
    assert kept["fewest"] == set()
    shapes = parameter_shapes(load_model_dir(tmp_path / "more").config)
    grown = sum(math.prod(shapes[name]) for name in kept["more"]) * 3.5 / 8
    assert 0.5 * grown < sizes["more"] - sizes["fewest"] < 1.1 * grown  # of blocks, not all full
    int8, no = ("export", run, "--out"), tmp_path / "no"
    for wrong in ((*options, no, "--no-calibration"), (*int8, no)):
        told = kvasir(*wrong, "--bits", "5", fails=True)
        assert "--bits is for --precision int4 on cpu, with calibration" in told


def test_chats_are_rendered_by_the_template(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": line}] for line in TEXT.splitlines()]
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    with pytest.raises(ValueError, match=r"chats\.jsonl holds chats, and the checkpoint no"):
        sample_calibration(load_checkpoint(run), file)
    (run / CHAT_TEMPLATE_FILE).write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    checkpoint = load_checkpoint(run)
    text = checkpoint.tokenizer.decode(sample_calibration(checkpoint, file).token_ids.tolist())
    assert sorted(text[1:-1].split("><")) == sorted(TEXT.splitlines())
    file.write_text('{"messages": []}')
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: not a chat"):
        sample_calibration(checkpoint, file)


@pytest.mark.parametrize("kind", ["words", "pieces", "bytes"])
def test_calibration_wants_text_that_the_tokenizer_knows(kind: str, tmp_path: Path) -> None:
    """Bytes can spell everything, so such a tokenizer cannot tell."""
    if kind == "words":
        tokenizer = Tokenizer(WordLevel({"<unk>": 0, "known": 1}, unk_token="<unk>"))  # noqa: S106
    elif kind == "pieces":
        tokenizer = Tokenizer(Unigram([("known", -1.0), ("<unk>", -9.0)], 1))
    else:
        tokenizer = train_tokenizer(["known"], 257)
    if kind != "bytes":
        tokenizer.pre_tokenizer = Whitespace()
    decoder = make_decoder(make_config(n_layer=1))
    save_checkpoint(tmp_path / "run", 1, decoder, tokenizer, {}, {})
    text = tmp_path / "text.txt"
    text.write_text("known " * 300 + "foreign words " * 200)
    checkpoint = load_checkpoint(tmp_path / "run")
    if kind == "bytes":
        sample_calibration(checkpoint, text)
        return
    with pytest.raises(ValueError, match=r"does not know 400 of 700 tokens of text\.txt"):
        sample_calibration(checkpoint, text)
