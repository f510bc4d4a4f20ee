"""Exported encoder-decoders in ONNX Runtime, end to end, against transformers and our oracle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvasir.export.directory import export_checkpoint
from kvasir.export.evaluation import verify_directory
from kvasir.export.graphs.source import load_both_weights
from kvasir.export.verification.pair_plan import SamplePairs
from kvasir.export.verification.samples import make_sample
from kvasir.export.verification.segments import SegmentedGraph
from kvasir.export.verification.verify import VerificationError, Verifier, check
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.directory import (
    ATTENTION_GRAPH_FILE,
    GRAPH_FILE,
    HEAD_MASK_INPUT,
    MANIFEST_FILE,
    ModelDirectoryError,
    load_model_dir,
)
from kvasir.model.onnx.runtime import open_cpu_session
from kvasir.model.training.data.translations import HELD_OUT_FILE
from tests.kit.encoder_decoders import PairSession, export_both
from tests.kit.fake_seq2seq import small_config
from tests.kit.huggingface_models import VOCABULARY, make_encoder_decoder, save
from tests.kit.random_models import make_decoder
from tests.kit.short_samples import shorten_samples

short_samples = pytest.fixture(scope="module", autouse=True)(shorten_samples)

_MAX_TOKENS = 48


@pytest.mark.parametrize("precision", ["fp32", "int8"])  # which share a trace
@torch.inference_mode()
def test_the_likeliest_text(precision: str, tmp_path: Path) -> None:
    """48 tokens, in one batch whose sources and targets all have other lengths.

    In int8 each token is likeliest, or nearly so, in PyTorch after the same ones.
    """
    model = make_encoder_decoder("t5")
    for parameter_name, parameter in model.named_parameters():
        if "Attention.q." in parameter_name:  # T5 trains small ones, since it has no scale
            parameter.mul_(0.25)
    checkpoint = load_checkpoint(save(tmp_path / "theirs", model))
    config, decoder = checkpoint.config, checkpoint.decoder
    export_both(config, checkpoint.weights, tmp_path / "ours", precision)
    torch.manual_seed(0)
    sources = [torch.randint(4, VOCABULARY, (n,)).tolist() for n in (1, 30, 2)]
    texts, logits = PairSession(tmp_path / "ours", config).generate(sources, _MAX_TOKENS)
    prefix = list(config.target_prefix)
    asked = {"num_beams": 1, "do_sample": False, "use_cache": False, "forced_eos_token_id": None}
    asked |= {"max_new_tokens": _MAX_TOKENS + len(prefix) - 1}
    for ids, text, of_text in zip(sources, texts, logits, strict=True):
        source_ids = torch.tensor([ids])
        source = decoder.read(source_ids, torch.tensor([len(ids)]))
        expected = decoder(torch.tensor([prefix + text[:-1]]), source=source)[0]
        expected = expected[len(prefix) - 1 :]
        error = torch.from_numpy(of_text) - expected
        if precision == "fp32":
            assert error.abs().max() < 1e-3 * expected.std()
            assert prefix + text == model.generate(source_ids, **asked)[0].tolist()
        else:
            assert error.std() < 0.25 * expected.std()
            chosen = expected.gather(1, torch.tensor(text)[:, None])[:, 0]
            assert (expected.amax(dim=1) - chosen).max() < expected.std()


def test_norms_before_sublayers_and_sinusoids(tmp_path: Path) -> None:
    """BART, below, has norms after them, and learned positions."""
    config = small_config()
    assert config.encoder is not None  # of heads that tests/kernels/test_fuse.py has, too
    config = replace(config, head_dim=16, encoder=replace(config.encoder, head_dim=16))
    weights = make_decoder(config).state_dict()
    export_both(config, weights, tmp_path)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(40, 2, 12))
    sample = SamplePairs("random tokens", [(source, target) for source, target in ids])
    verifier = Verifier(config, weights, sample)
    figures = verifier.verify(SegmentedGraph(tmp_path / GRAPH_FILE, config).logits)
    assert figures.max_logit_error < 1e-4
    assert figures.greedy_agreement == 1.0


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("published") / "bart", make_encoder_decoder("bart"))


@pytest.fixture(scope="module")
def exported(bart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "bart"
    export_checkpoint(bart, out, precision="fp32")
    return out


def test_the_directory_proves_both_graphs(bart: Path, exported: Path) -> None:
    model_dir, checkpoint = load_model_dir(exported), load_checkpoint(bart)
    manifest, figures = model_dir.manifest, model_dir.manifest.verification
    assert manifest.architecture == "kvasir-encoder-decoder"
    assert figures.max_logit_error < 1e-4
    assert figures.greedy_agreement == 1.0
    assert figures.longest == model_dir.config.max_model_len
    assert figures.perplexity_onnx == pytest.approx(figures.perplexity_torch)
    assert verify_directory(exported, bart)[1] == figures
    again = verify_directory(exported)[1]  # against the weights in the graphs
    assert again is not None
    assert again.max_logit_error == pytest.approx(figures.max_logit_error, abs=1e-4)
    loaded = load_both_weights(model_dir.config, model_dir.graph_path)
    assert loaded.keys() == checkpoint.weights.keys()
    for name in loaded:
        torch.testing.assert_close(loaded[name], checkpoint.weights[name], rtol=2e-7, atol=0.0)


def test_another_checkpoints_graphs_are_refused(bart: Path, exported: Path) -> None:
    """Though only its encoder differs."""
    checkpoint = load_checkpoint(bart)
    weights = {name: checkpoint.weights[name].clone() for name in checkpoint.weights}
    weights["encoder.blocks.1.feed_forward.down.weight"].neg_()
    sample = make_sample(checkpoint, None, "fp32")
    verifier = Verifier(checkpoint.config, weights, sample)
    figures = verifier.verify(SegmentedGraph(exported / GRAPH_FILE, checkpoint.config).logits)
    with pytest.raises(VerificationError, match="logits differ"):
        check(figures, "fp32")


@pytest.mark.parametrize("name", ["encoder.onnx", "encoder.onnx.data"])
def test_a_directory_without_its_encoder_is_refused(
    name: str, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "copy")
    manifest = json.loads((exported / MANIFEST_FILE).read_text())
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(ModelDirectoryError, match=f"{name} is missing"):
        load_model_dir(tmp_path / "copy")
    del manifest["files"][name]
    (tmp_path / "copy" / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(ModelDirectoryError, match=name):
        load_model_dir(tmp_path / "copy")


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"precision": "int4"}])
def test_what_encoder_decoders_lack_is_refused(
    options: dict[str, Any], bart: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="an encoder-decoder is fp32 or int8 on cpu, not"):
        export_checkpoint(bart, tmp_path / "out", **options)


@torch.inference_mode()
def test_figures_of_pairs(bart: Path, tmp_path: Path) -> None:
    """Some targets are the likeliest texts, and others differ from them in one token."""
    checkpoint = load_checkpoint(bart)
    config, decoder = checkpoint.config, checkpoint.decoder
    export_both(config, checkpoint.weights, tmp_path, "int8")
    torch.manual_seed(1)
    sources = [torch.randint(4, VOCABULARY, (n,)).tolist() for n in range(1, 21)]
    session = PairSession(tmp_path, config)
    targets, _ = session.generate(sources, 12)
    for i in range(0, 20, 3):
        targets[i][i % len(targets[i])] ^= 1
    pairs = [(np.array(a), np.array(b)) for a, b in zip(sources, targets, strict=True)]
    verifier = Verifier(config, checkpoint.weights, SamplePairs("pairs", pairs, True))
    figures = verifier.verify(SegmentedGraph(tmp_path / GRAPH_FILE, config).logits)
    assert figures.exact_match_onnx == 13 / 20

    prefix, losses, n_exact = list(config.target_prefix), list[torch.Tensor](), 0
    for ids, target in zip(sources, targets, strict=True):
        source = decoder.read(torch.tensor([ids]), torch.tensor([len(ids)]))
        logits = decoder(torch.tensor([prefix + target[:-1]]), source=source)[0, len(prefix) - 1 :]
        labels = torch.tensor(target)
        losses.append(functional.cross_entropy(logits, labels, reduction="none"))
        n_exact += int((logits.argmax(dim=1) == labels).all())
    assert figures.exact_match_torch == n_exact / 20
    expected = torch.cat(losses).mean().exp().item()
    assert figures.perplexity_torch == pytest.approx(expected, rel=1e-4)
    assert figures.perplexity_onnx == pytest.approx(expected, rel=0.1)
    worse = figures.model_copy(update={"exact_match_torch": 0.9, "perplexity_onnx": expected})
    with pytest.raises(VerificationError, match=r"answers 65.0% of pairs, 20 pairs exactly"):
        check(worse, "int8")


def test_pairs_are_those_that_were_held_out(bart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "step"
    shutil.copytree(bart, folder)
    lines = [{"source": "one two", "target": "1 2"}, {"source": "three", "target": "3"}]
    (folder / HELD_OUT_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = load_checkpoint(folder)
    sample = make_sample(checkpoint, None, "int8")
    assert isinstance(sample, SamplePairs)
    assert sample.are_translations
    encode, (end,) = checkpoint.tokenizer.encode, checkpoint.config.eos_token_ids
    expected = {
        (
            tuple(encode(line["source"]).ids),
            (*encode(line["target"], add_special_tokens=False).ids, end),
        )
        for line in lines
    }
    assert {(tuple(source), tuple(target)) for source, target in sample.pairs} == expected
    (tmp_path / "prose.txt").write_text("the same words again and again " * 40)
    sample = make_sample(checkpoint, tmp_path / "prose.txt", "int8")
    assert isinstance(sample, SamplePairs)
    assert not sample.are_translations
    assert len(sample.pairs) == 12


@torch.inference_mode()
def test_attention_weights(bart: Path, exported: Path) -> None:
    config, model = load_checkpoint(bart).config, make_encoder_decoder("bart")
    source, target = torch.randint(4, VOCABULARY, (1, 7)), torch.randint(4, VOCABULARY, (1, 5))
    theirs = model(source, decoder_input_ids=target, output_attentions=True)
    plain = PairSession(exported, config)
    session = open_cpu_session(exported / ATTENTION_GRAPH_FILE)
    places = np.arange(5)
    inputs = {
        "input_ids": target.numpy(),
        "position_ids": places[None],
        "seqlens_k": np.array([4], dtype=np.int32),
        "total_sequence_length": np.array(5, dtype=np.int32),
        "logits_indices": places,
        HEAD_MASK_INPUT: np.ones((3, config.n_head, 1), dtype=np.float32),
    }
    inputs |= plain.source_inputs([source[0].tolist()])
    del inputs["source_seqlens_k"], inputs["source_total_length"]  # it takes no padding
    names = [f"{kind}.{i}" for kind in ("attention", "source_attention") for i in range(3)]
    logits, *weights = session.run(["logits", *names], inputs)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(torch.from_numpy(logits), theirs.logits[0])
    expected = (*theirs.decoder_attentions, *theirs.cross_attentions)
    for ours, others in zip(weights, expected, strict=True):
        close(torch.from_numpy(ours), others)
