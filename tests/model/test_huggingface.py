"""Every family against transformers, which shares no line with the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvasir.export.graphs.decoder import export_graph
from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from kvasir.server.engine.engine import Engine
from kvasir.server.engine.sampling.params import SamplingParams
from tests.kit.engine_driver import make_sequence, run_to_end
from tests.kit.families import FAMILIES, LENGTH
from tests.kit.huggingface_checkpoints import (
    close,
    make_model,
    save_checkpoint,
    set_tensors,
    set_values,
)
from tests.kit.random_models import RandomModel

N_NEW = 64


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_logits_of_a_family(name: str, tmp_path: Path) -> None:
    model: Any = make_model(name)
    decoder = load_checkpoint(save_checkpoint(tmp_path, model)).decoder
    torch.manual_seed(4)
    input_ids = torch.randint(decoder.config.vocab_size, (2, LENGTH))
    close(decoder(input_ids), model(input_ids).logits)


def test_greedy_text_of_the_served_graph(tmp_path: Path) -> None:
    """With windows; tests/export compares all graphs with PyTorch."""
    model: Any = make_model("gemma3")
    decoder = load_checkpoint(save_checkpoint(tmp_path / "theirs", model)).decoder
    torch.manual_seed(4)
    prompt = torch.randint(decoder.config.vocab_size, (1, LENGTH - N_NEW - 2))
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_NEW, do_sample=False
    )
    expected = generated[0, prompt.shape[1] :].tolist()
    assert len(set(expected)) >= 12  # a text of few tokens would hide mistakes
    export_graph(decoder.config, decoder.state_dict(), tmp_path / "model.onnx")
    runner = RandomModel(decoder, tmp_path / "model.onnx").runner(max_num_seqs=1, threads=1)
    params = SamplingParams(max_tokens=N_NEW, temperature=0.0)
    sequence = make_sequence(0, prompt[0].tolist(), params)
    assert run_to_end(Engine(runner, chunk_size=16), [sequence])[0].token_ids == expected


@torch.inference_mode()
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM 4.5 has one behind the others, of which config.json tells."""
    model: Any = make_model("glm4_moe")
    folder = save_checkpoint(tmp_path, model)
    set_values(folder, "config.json", num_nextn_predict_layers=1)
    further = {"model.layers.2.eh_proj.weight": torch.ones(3, 4)}
    set_tensors(folder, lambda tensors: tensors | further)
    input_ids = torch.arange(40)[None]
    close(load_checkpoint(folder).decoder(input_ids), model(input_ids).logits)
    set_values(folder, "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unknown tensor 'model\.layers\.2\.eh_proj"):
        load_checkpoint(folder)


@torch.inference_mode()
def test_queries_beside_the_delta_rule_may_be_made_of_a_latent(tmp_path: Path) -> None:
    """Ling 3.0 tiny has three modules where transformers' class has one."""
    model: Any = make_model("bailing_hybrid")
    made = nn.Linear(64, 24, bias=False), nn.RMSNorm(24, 1e-6), nn.Linear(24, 96, bias=False)
    model.model.layers[1].self_attn.q_proj = nn.Sequential(*made)
    folder = save_checkpoint(tmp_path, model)
    set_values(folder, "config.json", q_lora_rank=24)

    def renamed(name: str) -> str:
        for i, part in enumerate(("q_a_proj", "q_a_layernorm", "q_b_proj")):
            name = name.replace(f"q_proj.{i}.", f"{part}.")
        return name

    set_tensors(folder, lambda tensors: {renamed(name): t for name, t in tensors.items()})
    input_ids = torch.arange(40)[None]
    close(load_checkpoint(folder).decoder(input_ids), model(input_ids).logits)
