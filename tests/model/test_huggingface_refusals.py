"""A published folder is refused in one line, with the mend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kvasir.model.checkpoint import CheckpointError, load_checkpoint
from tests.kit import huggingface_checkpoints as checkpoints
from tests.kit.huggingface_checkpoints import make_model, save_checkpoint
from tests.model.test_tokenizer import with_damaged_charsmap

WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("theirs"), make_model("llama", num_hidden_layers=1)
    )


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A whole checkpoint, to be broken."""
    return shutil.copytree(llama, tmp_path / "theirs")


Break = Callable[[Path], object]


def set_values(file: str, **values: Any) -> Break:
    return lambda folder: checkpoints.set_values(folder, file, **values)


def write(file: str, content: str | bytes) -> Break:
    return lambda folder: (folder / file).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def remove(file: str) -> Break:
    return lambda folder: (folder / file).unlink()


def set_tensors(**tensors: torch.Tensor) -> Break:
    return lambda folder: checkpoints.set_tensors(folder, lambda given: given | tensors)


def drop_tensor(name: str) -> Break:
    return lambda folder: checkpoints.set_tensors(
        folder, lambda given: {key: tensor for key, tensor in given.items() if key != name}
    )


def index(**files: object) -> Break:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(files))

    return change


def as_pytorch(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


WIDE = {name: torch.ones(301, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
HALF_TURNED = {"rope_theta": 1e4, "partial_rotary_factor": 9}
TOOL = {"302": {"content": "<tool>", "special": True}}
MOVED = {"5": {"content": "<s>", "special": True}}


def after(*breaks: Break) -> Break:
    """Break a folder in several places."""
    return lambda folder: [break_it(folder) for break_it in breaks]


def set_template(template: object) -> Break:
    in_config = set_values("tokenizer_config.json", chat_template=template)
    return after(remove("chat_template.jinja"), in_config)


def damage_charsmap(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    with_damaged_charsmap(Tokenizer.from_file(path), 0xC3).save(path)


# What is broken: how, and what a message says of it.
REFUSALS: dict[str, tuple[Break, str]] = {
    "no config": (remove("config.json"), "holds no checkpoint, nor a Hugging Face model"),
    "deep config": (write("config.json", "[" * 100_000), r"config\.json is nested too deeply"),
    "half a surrogate pair": (
        set_values("tokenizer_config.json", extra="\ud800"),
        r"tokenizer_config\.json is not JSON: .*surrogates not allowed",
    ),
    "too many layers": (
        set_values("config.json", num_hidden_layers=2**31 - 1),
        r"num_hidden_layers must be a whole number from 1 to 10000, not 2147483647",
    ),
    "more layers than weights": (
        set_values("config.json", num_hidden_layers=9999),
        r"a model of this shape has at least [\d,]+ weights, and there are [\d,]+; copy",
    ),
    "a shape beyond memory": (
        set_values("config.json", hidden_size=2**31 - 1, head_dim=16),
        r"a model of this shape has at least",
    ),
    "rotary fraction": (
        set_values("config.json", rope_parameters=HALF_TURNED),
        r"partial_rotary_factor is 9",
    ),
    "config that is no JSON": (write("config.json", "{"), r"config\.json is not JSON"),
    "config that is no object": (write("config.json", "[]"), r"config\.json must hold a JSON"),
    "another model": (
        set_values("config.json", model_type="t5", architectures=["T5Model"]),
        r"describes T5Model of model_type 't5'; supported are T5ForConditionalGeneration",
    ),
    "a new model": (
        set_values("config.json", model_type="llama9", architectures=["Llama9"]),
        r"'llama9'; the nearest that is computed is 'llama'; supported are afmoe, .*xglm",
    ),
    "no model type": (
        set_values("config.json", model_type=None, architectures=None),
        "describes a model of model_type None; supported",
    ),
    "another head": (
        set_values("config.json", architectures=["LlamaForTokenClassification"]),
        "describes LlamaForTokenClassification of model_type 'llama'",
    ),
    "end of text beyond the vocabulary": (
        set_values("config.json", eos_token_id=320),
        r"eos_token_id is 320, which is beyond the vocabulary of 320; name the token .* generation",
    ),
    "token beyond the vocabulary": (
        after(set_values("config.json", vocab_size=301), set_tensors(**WIDE)),
        r"prompts need the token '</s>', which .* as 301, but the model has only 301 tokens",
    ),
    "no tokenizer": (remove("tokenizer.json"), r"it has no tokenizer\.json; .* AutoTokenizer"),
    "broken tokenizer": (write("tokenizer.json", "{}"), r"tokenizer\.json is not a tokenizer"),
    "damaged charsmap": (damage_charsmap, "its precompiled_charsmap is damaged: index out of"),
    "more tokens than embeddings": (
        set_values("config.json", vocab_size=280),
        r"tokenizer\.json has token ids up to 301, but the model only 280 tokens",
    ),
    "chat template that is no text": (set_template({"a": 1}), "is neither a text nor texts by"),
    "chat templates without names": (
        set_template([{"name": [], "template": "x"}]),
        "is neither a text nor texts by",
    ),
    "token that only transformers adds": (
        set_values("tokenizer_config.json", added_tokens_decoder=TOOL),
        r"adds the token '<tool>' as 302, which tokenizer\.json does not have.* AutoTokenizer",
    ),
    "token under another id": (
        set_values("tokenizer_config.json", added_tokens_decoder=MOVED),
        r"adds the token '<s>' as 5, which",
    ),
    "added tokens that are no object": (
        set_values("tokenizer_config.json", added_tokens_decoder=["<s>"]),
        r"tokenizer_config\.json's added_tokens_decoder is \['<s>'\], not an object",
    ),
    "tokenizer in another encoding": (write("tokenizer.json", b"\xff"), "is not UTF-8 text"),
    "chat template in another encoding": (write("chat_template.jinja", b"\xff"), "is not UTF-8"),
    "only PyTorch's file": (as_pytorch, r"neither model\.safetensors nor .* with transformers"),
    "missing tensor": (drop_tensor(DOWN), r"'layers\.0\.mlp\.down_proj\.weight' of \[64, 96\]"),
    "missing head": (drop_tensor("lm_head.weight"), r"lacks the tensor 'lm_head.weight' of \[320"),
    "extra tensor": (
        set_tensors(**{"model.layers.1.mlp.down_proj.weight": torch.ones(64, 96)}),
        r"model\.safetensors holds the unknown tensor 'model\.layers\.1\.mlp\.down_proj\.weight'",
    ),
    "extra bias": (
        set_tensors(**{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        r"unknown tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'",
    ),
    "mis-shaped tensor": (
        set_tensors(**{DOWN: torch.ones(96, 64)}),
        rf"tensor '{DOWN}' in model\.safetensors has shape \[96, 64\], not \[64, 96\]",
    ),
    "tensor of integers": (
        set_tensors(**{DOWN: torch.ones(64, 96, dtype=torch.int8)}),
        rf"tensor '{DOWN}' in model\.safetensors is I8; supported are F32, F16, BF16",
    ),
    "tensor under two names": (
        set_tensors(**{"layers.0.mlp.down_proj.weight": torch.ones(64, 96)}),
        "are the same parameter",
    ),
    "missing shard": (index(weight_map={"x": "model-00002-of-00002.safetensors"}), "names 'model"),
    "shard elsewhere": (index(weight_map={"x": "../x.safetensors"}), r"names '\.\./x"),
    "index without a map": (index(metadata={}), r"index\.json has no weight_map"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_folder_is_refused_in_one_line(name: str, folder: Path) -> None:
    break_it, message = REFUSALS[name]
    break_it(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


MATRICES = {
    "afmoe": "model.layers.1.self_attn.gate_proj",
    "lfm3": "model.layers.1.self_attn.g_proj",
}
MATRICES |= {"gpt_neox_japanese": "gpt_neox_japanese.layers.0.attention.dense"}


@pytest.mark.parametrize("kind", MATRICES)
def test_a_file_may_leave_out_a_bias_and_not_its_matrix(kind: str, tmp_path: Path) -> None:
    folder, name = save_checkpoint(tmp_path, make_model(kind)), MATRICES[kind]
    place = name.replace("g_proj", "gate_proj")  # in files
    drop_tensor(f"{place}.bias")(folder)
    load_checkpoint(folder)
    drop_tensor(f"{place}.weight")(folder)
    with pytest.raises(CheckpointError, match=rf"lacks the tensor '.*{name[-6:]}\.weight'"):
        load_checkpoint(folder)


KEYS = {
    "config.json": "architectures model_type bos_token_id eos_token_id hidden_act rope_parameters",
    "generation_config.json": "bos_token_id eos_token_id temperature top_k repetition_penalty",
    "tokenizer_config.json": "chat_template added_tokens_decoder bos_token extra_special_tokens",
    "special_tokens_map.json": "bos_token image_token extra_special_tokens",
    f"{WEIGHTS}.index.json": "weight_map",
}
WRONG: list[Any] = [None, True, "x", [], {}, ["x"], {"x": 1}, {"1": []}, {"x": WEIGHTS}, [[]], [{}]]
WRONG += [[None], -1, 1.5]


@pytest.mark.parametrize("file", KEYS)
def test_whatever_a_file_holds_ends_in_a_checkpoint_or_in_one_line(file: str, folder: Path) -> None:
    """Try every key that is read here with every wrong type."""
    remove("chat_template.jinja")(folder)
    if file.endswith(".index.json"):
        index()(folder)
    path = folder / file
    known = json.loads(path.read_text()) if path.is_file() else {}
    for key in KEYS[file].split():
        for wrong in WRONG:
            path.write_text(json.dumps({**known, "do_sample": True, key: wrong}))
            try:
                load_checkpoint(folder)
            except CheckpointError as error:
                assert "\n" not in str(error)  # noqa: PT017
