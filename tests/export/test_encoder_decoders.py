"""Exported encoder-decoders in ONNX Runtime, end to end, against transformers and our oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from tests.encoder_decoders import PairSession, export_both
from tests.model.test_encoder_decoders import VOCABULARY, make_model, save

_MAX_TOKENS = 64


@pytest.mark.parametrize("name", ["t5", "t5 1.1", "bart", "marian", "m2m_100", "pegasus"])
@torch.inference_mode()
def test_the_likeliest_text(name: str, tmp_path: Path) -> None:
    """64 tokens, in one batch whose sources and targets all have other lengths."""
    model = make_model(name, max_position_embeddings=80, n_positions=80)
    checkpoint = load_checkpoint(save(tmp_path / "theirs", model))
    config, decoder = checkpoint.config, checkpoint.decoder
    export_both(config, checkpoint.weights, tmp_path / "ours")
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
        assert (torch.from_numpy(of_text) - expected).abs().max() < 1e-3 * expected.std()
        assert prefix + text == model.generate(source_ids, **asked)[0].tolist()
