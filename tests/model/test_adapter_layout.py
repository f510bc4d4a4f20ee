"""How adapters of published models fit ours: rows, parts and factors of every importer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.model.adapters.layout import Layout
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.importing.plan import plan_adapters
from tests.kit.huggingface_checkpoints import make_model
from tests.kit.huggingface_models import make_encoder, make_encoder_decoder, save
from tests.kit.random_models import make_config, make_decoder

# Matrices that are stacked, transposed, interleaved by head, in blocks, with pairs apart, scaled.
KINDS = ["llama", "gpt2", "gpt_neox", "gptj", "falcon", "phi", "phi3", "cohere", "mpt", "granite"]
KINDS += ["codegen", "bloom", "hyperclovax", "deepseek_v2", "gemma2", "olmo clipped", "glm4_moe"]
KINDS += ["internlm3", "minicpm3", "qwen2_moe", "lfm2", "qwen3_next", "bamba", "jamba", "falcon_h1"]
KINDS += ["gemma3 beside vision", "hy_v3", "lfm3"]
MAKERS: dict[str, Callable[[], Any]] = {kind: partial(make_model, kind) for kind in KINDS}
MAKERS |= {"bert": partial(make_encoder, "bert")}
MAKERS |= {kind: partial(make_encoder_decoder, kind) for kind in ("t5", "bart")}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_change_of_published_weights_is_that_of_the_rows_that_the_layout_names(
    kind: str, tmp_path: Path
) -> None:
    model = MAKERS[kind]()
    before = load_checkpoint(save(tmp_path / "before", model))
    assert before.adapters is not None
    layout = before.adapters()
    layout.save(tmp_path / "layout.safetensors")
    layout = Layout.load(tmp_path / "layout.safetensors")
    changes: dict[str, np.ndarray] = {}
    names = {part.module for layer in layout.layers.values() for part in layer.parts}
    for name, module in model.named_modules():
        if name in names:
            change = torch.randn_like(module.weight)
            with torch.no_grad():
                module.weight.add_(change)
            is_transposed = type(module).__name__ == "Conv1D"
            changes[name] = (change.t() if is_transposed else change).numpy()
    assert changes.keys() == names
    after = load_checkpoint(save(tmp_path / "after", model))
    n_layers = {name for name in before.weights if name.endswith("attention.output.weight")}
    assert n_layers <= layout.layers.keys()
    for name, layer in layout.layers.items():
        assert sum(len(part.rows) for part in layer.parts) == len(layer.outputs)
        expected = (after.weights[name].float() - before.weights[name].float()).numpy()
        for part in layer.parts:
            assert len(changes[part.module]) == part.n_out
            ours = slice(part.first, part.first + len(part.rows))
            found = changes[part.module][part.rows] * layer.outputs[ours, None] * layer.inputs
            np.testing.assert_allclose(found, expected[ours], atol=1e-5)


def test_a_damaged_layout_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "layout.safetensors"
    path.write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=r"layout.safetensors is damaged: [^\n]+$"):
        Layout.load(path)


def test_a_model_of_ours_has_its_own_names() -> None:
    layout = plan_adapters(make_config())
    decoder = make_decoder(make_config())
    for name, layer in layout.layers.items():
        module = decoder.get_submodule(layer.parts[0].module)
        assert isinstance(module, torch.nn.Linear)
        assert module.weight.shape == (layer.parts[0].n_out, len(layer.inputs)), name
