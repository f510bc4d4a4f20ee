"""The forms that checkpoint folders come in, and what travels with the weights."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from torch import Tensor

from kvasir.model import tensor_files
from kvasir.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from kvasir.model.template.chat_template import ChatTemplate
from tests.kit.families import FAMILIES as CHECKPOINTS
from tests.kit.huggingface_checkpoints import (
    BOS,
    EOS,
    TEXT,
    close,
    make_model,
    make_tokenizer,
    save_checkpoint,
    set_tensors,
    set_values,
)

Folders = Callable[[str], Path]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Saved checkpoints of one layer by family, made once; to be read only."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_checkpoint(
                tmp_path_factory.mktemp("theirs"), make_model(name, num_hidden_layers=1)
            )
        return made[name]

    return folder


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (load_checkpoint(folder).weights for folder in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def with_tensors(folder: Path, copy: Path, change: Change) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, copy)
    set_tensors(copy, change)
    return copy


def with_values(folder: Path, copy: Path, file: str, **values: object) -> Path:
    """A copy of a checkpoint with other values in one of its files."""
    shutil.copytree(folder, copy)
    set_values(copy, file, **values)
    return copy


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {
        new + name.removeprefix(old) if name.startswith(old) else name: t
        for name, t in tensors.items()
    }


def with_buffers(*names: str) -> Change:
    return lambda tensors: tensors | {name: torch.ones(3, dtype=torch.bool) for name in names}


GPT2_MASKS = ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")
NEOX_BUFFERS = [f"gpt_neox.layers.0.attention.{n}" for n in ("bias", "masked_bias")]
NEOX_BUFFERS += ["gpt_neox.layers.0.attention.rotary_emb.inv_freq"]
FREQUENCIES = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
SAME: dict[str, tuple[str, Change]] = {
    "gpt2 without prefix": ("gpt2", renamed("transformer.", "")),
    "llama without prefix": ("llama", renamed("model.", "")),
    "opt as its base model": ("opt", renamed("model.decoder.", "decoder.")),
    "opt without prefix": ("opt", renamed("model.decoder.", "")),
    "gpt_neox without prefix": ("gpt_neox", renamed("gpt_neox.", "")),
    "gpt_neox's head under its name": ("gpt_neox", renamed("embed_out.", "lm_head.")),
    "gpt_neox's head under its former name": ("gpt_neox", renamed("lm_head.", "embed_out.")),
    "gpt2 with masks": ("gpt2", with_buffers(*GPT2_MASKS)),
    "gpt_neox with buffers": ("gpt_neox", with_buffers(*NEOX_BUFFERS)),
    "llama with frequencies": ("llama", with_buffers(*FREQUENCIES)),
    "tied with its head": (
        "llama3",
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    ),
    "tied under the head's name": ("llama3", renamed("model.embed_tokens.", "lm_head.")),
}


@pytest.mark.parametrize("variant", SAME)
def test_the_same_weights_in_another_form_are_the_same(
    variant: str, folders: Folders, tmp_path: Path
) -> None:
    name, change = SAME[variant]
    other = with_tensors(folders(name), tmp_path / "theirs", change)
    assert same_weights(other, folders(name))


def test_shards_are_one_checkpoint(folders: Folders, tmp_path: Path) -> None:
    model: Any = make_model("llama", num_hidden_layers=1)
    save_checkpoint(tmp_path / "theirs", model, max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert same_weights(tmp_path / "theirs", folders("llama"))


def test_a_head_that_differs_from_the_embedding_is_its_own(
    folders: Folders, tmp_path: Path
) -> None:
    """Though config.json says tied: as transformers reads such a checkpoint."""
    head = torch.randn(320, 64)
    folder = with_tensors(
        folders("llama3"), tmp_path / "theirs", lambda tensors: tensors | {"lm_head.weight": head}
    )
    checkpoint = load_checkpoint(folder)
    assert not checkpoint.config.tied_embeddings
    assert torch.equal(checkpoint.weights["head.weight"], head)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_stay_so(dtype: torch.dtype, tmp_path: Path) -> None:
    """Only Gemma's norms, 1 + w, become float32."""
    model: Any = make_model("gemma2", num_hidden_layers=2).to(dtype)
    checkpoint = load_checkpoint(save_checkpoint(tmp_path / "theirs", model))
    weights = checkpoint.weights
    assert {tensor.dtype for name, tensor in weights.items() if "norm" not in name} == {dtype}
    assert {tensor.dtype for name, tensor in weights.items() if "norm" in name} == {torch.float32}
    kind: Any = transformers.Gemma2ForCausalLM
    wide = kind.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32, attn_implementation="eager"
    )
    input_ids = torch.randint(320, (2, 40))
    with torch.inference_mode():
        close(checkpoint.decoder(input_ids), wide(input_ids).logits)


def test_one_expert_at_a_time_is_read(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    read = tensor_files._read

    def watched(path: Path, name: str) -> Tensor:
        assert all(reference() is None for reference in alive)
        tensor = read(path, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(tensor_files, "_read", watched)
    weights = load_checkpoint(folders("qwen3_moe with shares of all experts")).weights
    for name in weights:
        if "expert_" in name:
            alive.clear()
            assert weights[name].is_contiguous()
            assert len(alive) == (10 if "expert_up" in name else 5)


def opened_with(folder: Path, tmp_path: Path, file: str, **values: object) -> Checkpoint:
    return load_checkpoint(with_values(folder, tmp_path / "theirs", file, **values))


MESSAGES = [{"role": "user", "content": "hello"}]
NAMED = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]


@pytest.mark.parametrize(
    ("template", "files", "left_out"),
    [
        ("{{ messages }}", {}, None),
        (NAMED, {}, "rag"),
        ({"tool_use": "{{ tools }}\n", "default": "yes\n", "rag": "no"}, {}, "rag"),
        ({"tool_use": "no", "rag": "no"}, {}, "rag, tool_use; none of them is the default"),
        (None, {}, None),
        (NAMED, {"chat_template.jinja": "file"}, None),
        ("old", {"additional_chat_templates/default.jinja": "yes"}, None),
        (
            None,
            {"chat_template.jinja": "no", "additional_chat_templates/default.jinja": "yes"},
            None,
        ),
        ("old", {"chat_template.jinja": "yes", "additional_chat_templates/rag.jinja": "no"}, "rag"),
        ("old", {"additional_chat_templates/rag.jinja": "no"}, "rag; none of them is the default"),
        ([{"name": "rag", "template": "no"}], {}, "rag; none of them is the default"),
        ({"rag": "no"}, {}, "rag; none of them is the default"),
    ],
)
def test_the_chat_template_is_the_one_that_transformers_renders(
    template: object,
    files: dict[str, str],
    left_out: str | None,
    folders: Folders,
    tmp_path: Path,
) -> None:
    """Wherever it is, with tools or without; the others by name are left out, which is said."""
    folder = with_values(
        folders("llama"), tmp_path / "theirs", "tokenizer_config.json", chat_template=template
    )
    (folder / "chat_template.jinja").unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.notes == (
        () if left_out is None else (f"chat templates left out: {left_out}",)
    )
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate.parse(checkpoint.extra_files)
    if ours is None:
        with pytest.raises(ValueError, match=r"no default specified|chat_template is not set"):
            theirs.apply_chat_template(MESSAGES, tokenize=False)
    else:
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            rendered = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert ours.render(MESSAGES, tools=tools) == rendered


def added(content: str) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
    return {"__type": "AddedToken", "content": content, **flags}


WITHOUT = {"added_tokens_decoder": None}  # as a folder has it whose special tokens are in the map


@pytest.mark.parametrize(
    ("config", "in_map"),
    [
        ({}, {"bos_token": "old", "sep_token": "old"}),
        (
            {"sep_token": "a", "cls_token": added("b"), "mask_token": "c", "pad_token": None},
            {"pad_token": "old"},
        ),
        ({"image_token": "a", "extra_special_tokens": {"audio_token": "b", "eoi": "c"}}, {}),
        ({"extra_special_tokens": ["a", "b"]}, {}),
        (
            WITHOUT | {"bos_token": "old", "sep_token": "a"},
            {"bos_token": BOS, "unk_token": added("?")},
        ),
        (WITHOUT | {"pad_token": "old"}, {"pad_token": None, "additional_special_tokens": ["a"]}),
        (WITHOUT | {"image_token": "a"}, {"image_token": "old", "audio_token": "b"}),
        (
            WITHOUT | {"extra_special_tokens": {"eoi": "old"}},
            {"extra_special_tokens": {"eoi": "a", "boi": "b"}},
        ),
    ],
)
def test_special_tokens_are_those_that_transformers_gives_a_template(
    config: dict[str, object],
    in_map: dict[str, object],
    folders: Folders,
    tmp_path: Path,
) -> None:
    """Without added_tokens_decoder in tokenizer_config.json, special_tokens_map.json counts."""
    folder = with_values(folders("llama"), tmp_path / "theirs", "special_tokens_map.json", **in_map)
    path = folder / "tokenizer_config.json"
    decoder = {
        str(make_tokenizer().token_to_id(token)): {"content": token, "special": True}
        for token in (BOS, EOS)
    }
    values = json.loads(path.read_text()) | {"added_tokens_decoder": decoder} | config
    path.write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    written = load_checkpoint(folder).extra_files["special_tokens_map.json"]
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert json.loads(written) == theirs.special_tokens_map


@pytest.mark.parametrize(
    ("generation", "in_config", "bos", "eos"),
    [
        ({}, {"bos_token_id": 3, "eos_token_id": 4}, 3, (4,)),
        ({"eos_token_id": [5, 6]}, {"bos_token_id": 3, "eos_token_id": 4}, 3, (5, 6)),
        ({"bos_token_id": 7, "eos_token_id": 5}, {"eos_token_id": [4, 8]}, 7, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": [4, 8]}, None, (4, 8)),
        ({}, {"eos_token_id": None}, None, ()),
    ],
)
def test_ends_of_text_come_from_generation_config_first(
    generation: dict[str, object],
    in_config: dict[str, object],
    bos: int | None,
    eos: tuple[int, ...],
    folders: Folders,
    tmp_path: Path,
) -> None:
    folder = with_values(folders("llama"), tmp_path / "theirs", "config.json", **in_config)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = load_checkpoint(folder).config
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": None, "max_length": 20},
            {"temperature": 0.6, "top_k": 20},
        ),
        ({"temperature": 0.6, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True, "typical_p": 0.5}, {"typical_p": 0.5}),
        ({"do_sample": True, "top_p": None}, {}),
    ],
)
def test_sampling_defaults_are_taken_where_they_have_a_meaning(
    given: dict[str, object], expected: dict[str, float], folders: Folders, tmp_path: Path
) -> None:
    checkpoint = opened_with(folders("llama"), tmp_path, "generation_config.json", **given)
    assert json.loads(checkpoint.extra_files.get("generation_config.json", "{}")) == expected


def test_sampling_defaults_that_the_api_does_not_take_are_left_out_and_named(
    folders: Folders, tmp_path: Path
) -> None:
    left_out = {"top_k": -1, "top_p": 0, "min_p": "x", "repetition_penalty": [1]}
    given = {"do_sample": True, "temperature": 0.6, **left_out}
    checkpoint = opened_with(folders("llama"), tmp_path, "generation_config.json", **given)
    assert json.loads(checkpoint.extra_files["generation_config.json"]) == {"temperature": 0.6}
    for note, (name, value) in zip(checkpoint.notes, left_out.items(), strict=True):
        assert note.startswith(f"generation_config.json's {name} is left out: {value!r}: ")


VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
VISION |= {"num_attention_heads": 2, "patch_size": 14}
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3", VISION | {"model_type": "siglip_vision_model"}),
    "mistral": ("Mistral3", "llama", VISION | {"model_type": "pixtral", "head_dim": 8}),
    "ministral3": ("Mistral3", "ministral3", VISION | {"model_type": "pixtral", "head_dim": 8}),
}


@pytest.mark.parametrize("name", SEEING)
def test_the_decoder_of_a_model_that_sees_images_is_imported_alone(
    name: str, tmp_path: Path
) -> None:
    """Whichever of the names its tensors have."""
    architecture, text, vision = SEEING[name]
    text_config = CHECKPOINTS[text][1] | {"num_hidden_layers": 2}
    text_config["model_type"] = "gemma3_text" if name == "gemma3" else name
    config = getattr(transformers, f"{architecture}Config")(
        text_config=text_config, vision_config=vision, tie_word_embeddings=name == "gemma3"
    )
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{architecture}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager"
    )
    folder = save_checkpoint(tmp_path / "theirs", model.eval())
    tensors = load_file(folder / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.notes == ("only the part for text is read: the model sees no images",)
    input_ids = torch.randint(320, (2, 40))
    with torch.inference_mode():
        close(checkpoint.decoder(input_ids), model(input_ids).logits)
    former, usual = "language_model.model.", "model.language_model."
    for i, (old, new) in enumerate([(former, usual), (usual, former)]):
        other = with_tensors(folder, tmp_path / f"theirs {i}", renamed(old, new))
        assert same_weights(other, folder)
    quantised = with_values(
        folder, tmp_path / "quantised", "config.json", quantization_config={"bits": 4}
    )
    with pytest.raises(CheckpointError, match="quantization_config lacks"):
        load_checkpoint(quantised)


def test_tokens_that_prompts_do_not_need_may_be_beyond_the_vocabulary(
    folders: Folders, tmp_path: Path
) -> None:
    """As a token for padding, or Gemma 3's for images where the model sees none."""
    folder = shutil.copytree(folders("llama"), tmp_path / "theirs")
    tokenizer = Tokenizer.from_str(make_tokenizer().to_str())
    tokenizer.add_special_tokens([f"<{i}>" for i in range(320 - tokenizer.get_vocab_size())])
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens(["[PAD]", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = {"320": {"content": "[PAD]", "special": True}}
    values = {"pad_token": "[PAD]", "added_tokens_decoder": decoder}
    folder = with_values(folder, tmp_path / "padded", "tokenizer_config.json", **values)
    checkpoint = load_checkpoint(folder)
    (note,) = checkpoint.notes
    assert note.endswith("beyond its vocabulary of 320, are left out: '[PAD]', '<image>'")
    assert checkpoint.tokenizer.get_vocab() == known


def test_an_end_of_text_beyond_the_vocabulary_is_left_out_and_named(
    folders: Folders, tmp_path: Path
) -> None:
    checkpoint = opened_with(
        folders("llama"), tmp_path, "generation_config.json", eos_token_id=[5, 320]
    )
    assert checkpoint.config.eos_token_ids == (5,)
    assert checkpoint.notes[0].startswith("end-of-text token 320 is left out: it is beyond")


@cache
def sentence_pieces() -> Tokenizer:
    """As published for Llama 2 and TinyLlama: a space before every text between special tokens."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=56, show_progress=False)
    trained.train_from_iterator(TEXT.split("\n"), trainer)
    state = json.loads(trained.to_str())
    known = state["model"]["vocab"]
    names = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(known, key=known.get)]
    state["model"] |= {"vocab": {name: i for i, name in enumerate(names)}}
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    made = Tokenizer.from_str(json.dumps(state))
    special = [AddedToken(name, normalized=False, special=True) for name in (BOS, EOS)]
    made.add_special_tokens(special)
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return made


TINY_LLAMA = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("llama", {"legacy": False}),
        ("llama", {"legacy": True}),
        ("llama", {"add_prefix_space": False}),
        ("llama", {"add_bos_token": False, "add_eos_token": True}),  # tokenizer.json decides
        ("mistral", {"legacy": False}),
    ],
)
def test_a_llamas_chats_are_the_tokens_of_transformers(
    family: str, values: dict[str, object], folders: Folders, tmp_path: Path
) -> None:
    """Though tokenizer.json itself says otherwise of spaces after special tokens."""
    kind: dict[str, Any] = {"model_type": family, "architectures": None}
    folder = with_values(folders("llama"), tmp_path / "copy", "config.json", **kind)
    (folder / "chat_template.jinja").write_text(TINY_LLAMA)
    sentence_pieces().save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **values}
    folder = with_values(folder, tmp_path / "theirs", "tokenizer_config.json", **values)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    checkpoint = load_checkpoint(folder)
    ours, template = checkpoint.tokenizer, ChatTemplate.parse(checkpoint.extra_files)
    assert template is not None
    messages = [
        {"role": role, "content": content}
        for role, content in [("system", "the line"), ("user", " a  text"), ("assistant", "twice")]
    ]
    expected = theirs.apply_chat_template(messages, return_dict=False)
    assert ours.encode(template.render(messages), add_special_tokens=False).ids == expected
    for text in (TEXT[:100], "", f"{BOS}the{EOS} line", " Ünïcode 你好 \n\n  x"):
        assert ours.encode(text).ids == theirs(text).input_ids
