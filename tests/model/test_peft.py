"""Folders of adapters: peft's own are read as peft reads them, and others refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.model.adapters.config import MOST_RANK, AdapterError
from kvasir.model.adapters.layout import Layout
from kvasir.model.adapters.peft import PeftAdapter, read_adapter
from kvasir.model.checkpoint import load_checkpoint
from tests.kit.adapters import change_tensors, save_adapter, set_config
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint

MOST_BYTES = 2**20
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    adapters = load_checkpoint(
        save_checkpoint(tmp_path_factory.mktemp("model"), make_model("llama"))
    ).adapters
    assert adapters is not None
    return adapters()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(folder, make_model("llama"))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def read(folder: Path, layout: Layout) -> PeftAdapter:
    return read_adapter(folder, "poet", layout, MOST_BYTES)


PATTERNS = {
    "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7},
    "alpha_pattern": {"q_proj": 5},
}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"use_rslora": True}, torch.float16),
        ({"target_modules": ["q_proj", "down_proj"]}, torch.bfloat16),
        (PATTERNS, torch.float32),
    ],
)
def test_what_is_added_is_what_peft_merges(
    options: dict[str, Any], dtype: torch.dtype, layout: Layout, tmp_path: Path
) -> None:
    model = make_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapted = save_adapter(tmp_path, model, **options)
    change_tensors(tmp_path, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    found = read(tmp_path, layout)
    after = adapted.merge_and_unload().state_dict()
    error = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for name, weight in before.items():
        expected = (after[name] - weight).numpy()
        module = found.modules.get(layout.part_name(name.removesuffix(".weight")))
        if module is None:
            assert not expected.any(), name
            continue
        np.testing.assert_allclose(module.scaling * module.b @ module.a, expected, atol=error)


def test_a_name_for_the_content(layout: Layout, folder: Path, saved: Path) -> None:
    """Whatever the folder's name; it is another after a change of numbers or of their factor."""
    digest = read(saved, layout).digest
    assert read(folder, layout).digest == digest
    set_config(folder, lora_alpha=9)
    assert read(folder, layout).digest != digest
    shutil.copy(saved / "adapter_config.json", folder)
    change_tensors(folder, lambda tensors: {n: 2 * t for n, t in tensors.items()})
    assert read(folder, layout).digest != digest


def replace(**tensors: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(held: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t for n, t in (held | tensors).items() if t is not None}

    return change


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias must be 'none', not 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA', not 'LOHA'"),
        ({"task_type": "SEQ_CLS"}, "task_type must be"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"target_parameters": ["experts"]}, "target_parameters is ['experts']"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is [1]"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be"),
        ({"a_new_kind": 3}, "a_new_kind is 3; expected nothing"),
        ({"r": 5}, "lora_A is (4, 96); expected shape (5, 96)"),  # the rank of the tensors
        ({"r": MOST_RANK + 1}, f"r must be less than or equal to {MOST_RANK}, not {MOST_RANK + 1}"),
        ({"lora_alpha": None}, "lacks the field 'lora_alpha'"),
        ({"r": "4"}, "r must be a valid integer, not '4'"),
        ({"lora_alpha": math.inf}, "lora_alpha must be a finite number, not inf"),
        ({"rank_pattern": {"(a+)+": 4}}, "rank_pattern.(a+)+"),
        ({"rank_pattern": [4]}, "rank_pattern must be a valid dictionary, not [4]"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_its_field(
    values: dict[str, Any], named: str, layout: Layout, folder: Path
) -> None:
    set_config(folder, **values)
    with pytest.raises(AdapterError) as caught:
        read(folder, layout)
    message = str(caught.value)
    assert message.startswith("adapter 'poet': ")
    assert named in message
    assert "\n" not in message


HUGE = torch.zeros(4, 33)
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
HEAD, BIAS = "base_model.model.lm_head.lora_A.weight", Q.replace("weight", "bias")
DORA = Q.replace("A.weight", "magnitude_vector")


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({Q: None}, "q_proj.lora_A is missing; expected shape (4, 64)"),
        ({Q.replace("A", "B"): None}, "q_proj.lora_B is missing"),
        ({Q: HUGE}, "q_proj.lora_A is (4, 33); expected shape (4, 64)"),
        ({Q: torch.full((4, 64), math.nan)}, f"tensor {Q!r} is not finite"),
        ({Q: torch.full((4, 64), math.inf)}, f"tensor {Q!r} is not finite"),
        ({Q: torch.ones(4, 64, dtype=torch.int8)}, "is I8; expected F32 or F16 or BF16"),
        *[({name: HUGE}, f"tensor is {name!r}") for name in (EMBEDDING, HEAD, BIAS, DORA)],
        ({Q.replace("q_proj", "x_proj"): HUGE}, "x_proj"),
        ({Q.replace("layers.0", "layers.7"): HUGE}, "layers.7"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tensors: dict[str, Tensor | None], named: str, layout: Layout, folder: Path
) -> None:
    change_tensors(folder, replace(**tensors))
    with pytest.raises(AdapterError) as caught:
        read(folder, layout)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_bytes", [0, 4, 100, -1])
def test_a_file_that_was_cut_off_is_refused(n_bytes: int, layout: Layout, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:n_bytes])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged"):
        read(folder, layout)


@pytest.mark.parametrize("offsets", [[0, 1024, 2], [0], ["0", "1024"], {}, None])
def test_a_tensor_at_no_place_of_the_file_is_refused(
    offsets: Any, layout: Layout, folder: Path
) -> None:
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])
    header[Q]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[first:])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged"):
        read(folder, layout)


def test_a_folder_without_its_files_is_refused(layout: Layout, folder: Path) -> None:
    with pytest.raises(AdapterError, match=r"more than 1,000 bytes"):
        read_adapter(folder, "poet", layout, 1000)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(
        AdapterError, match=r"adapter_config.json is unusable .it must hold a JSON object"
    ):
        read(folder, layout)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"folder is .*adapter_config.json: no such file"):
        read(folder, layout)


def test_an_adapter_of_a_larger_model_is_refused(layout: Layout, tmp_path: Path) -> None:
    save_adapter(tmp_path, make_model("llama", hidden_size=96))
    with pytest.raises(AdapterError, match=r"lora_B is \(96, 4\); expected shape \(64, 4\)"):
        read(tmp_path, layout)
