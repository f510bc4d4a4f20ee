"""Published encoder-decoders against transformers: logits, greedy text and beams."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.network.cross_attention import Source
from kvasir.model.network.transformer import Transformer
from kvasir.model.reference import generate
from tests.kit.beam_search import beam_search
from tests.kit.huggingface_checkpoints import close
from tests.kit.huggingface_models import ENCODER_DECODERS, VOCABULARY, make_encoder_decoder, save

_END = 2
_MAX_TOKENS = 12


def make_source(decoder: Transformer, seed: int, n_tokens: int) -> tuple[Tensor, Source]:
    torch.manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (1, n_tokens))
    return ids, decoder.read(ids, torch.tensor([n_tokens]))


def options(decoder: Transformer) -> dict[str, Any]:
    """Return the arguments of transformers' generate; a forced token counts as new there."""
    forced = len(decoder.config.target_prefix) - 1
    fixed = {"do_sample": False, "use_cache": False, "forced_eos_token_id": None}
    return fixed | {"max_new_tokens": _MAX_TOKENS + forced}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@torch.inference_mode()
def test_logits_and_the_likeliest_text(name: str, tmp_path: Path) -> None:
    model = make_encoder_decoder(name)
    decoder = load_checkpoint(save(tmp_path, model)).decoder
    sources = torch.randint(4, VOCABULARY, (3, 30))
    targets = torch.randint(4, VOCABULARY, (3, 25))
    lengths = torch.tensor([30, 11, 1])
    within = (torch.arange(30) < lengths[:, None]).long()
    theirs = model(sources.where(within == 1, 1), within, decoder_input_ids=targets).logits
    close(decoder(targets, source=decoder.read(sources, lengths)), theirs)
    prefix, ends = list(decoder.config.target_prefix), decoder.config.eos_token_ids
    ids, source = make_source(decoder, 9, 9)
    text = model.generate(ids, num_beams=1, **options(decoder))[0].tolist()
    found = generate(decoder, prefix, max_tokens=_MAX_TOKENS, ending_ids=ends, source=source)
    assert prefix + found == text


@torch.inference_mode()
def test_beams(tmp_path: Path) -> None:
    """With a forced token, and an ending one that is likely at times."""
    model = make_encoder_decoder("bart")
    model.final_logits_bias[0, _END] = 4.0
    decoder = load_checkpoint(save(tmp_path, model)).decoder
    prefix, ends = list(decoder.config.target_prefix), decoder.config.eos_token_ids
    kinds: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    kinds |= {"return_dict_in_generate": True} | options(decoder)
    for seed, (penalty, early) in enumerate(product([0.0, 1.0, 2.5], [True, False, "never"])):
        asked: dict[str, Any] = {"length_penalty": penalty, "early_stopping": early}
        ids, source = make_source(decoder, seed, 7)
        found = model.generate(ids, **kinds, **asked)
        ours = beam_search(
            decoder, source, n_beams=3, max_tokens=_MAX_TOKENS, ending_ids=ends, **asked
        )
        texts = [[*prefix, *beam.token_ids] for beam in ours]
        theirs = found.sequences.tolist()
        assert texts == [one[: len(text)] for one, text in zip(theirs, texts, strict=True)]
        assert all(set(one[len(text) :]) <= {1} for one, text in zip(theirs, texts, strict=True))
        scores = torch.tensor([beam.score for beam in ours])
        torch.testing.assert_close(scores, found.sequences_scores, rtol=1e-4, atol=1e-5)
