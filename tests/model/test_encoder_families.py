"""Published encoders against transformers: vectors of tokens, of texts, and scores of labels."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvasir.model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from kvasir.model.config import Pooling
from kvasir.model.configuration.parts import Projection
from kvasir.model.importing.families import encoders
from kvasir.model.records import EmbeddingDefaults
from tests.kit.huggingface_checkpoints import close, set_tensors, set_values
from tests.kit.huggingface_models import ENCODERS, make_encoder, save

LENGTHS = [40, 7, 2]
CLASSIFIERS = [name for name in ENCODERS if name != "embedding gemma"]


def random_rows(n_types: int | None) -> dict[str, Tensor]:
    """Return the arguments of a model of transformers."""
    torch.manual_seed(1)
    shape = (len(LENGTHS), max(LENGTHS))
    rows = {"input_ids": torch.randint(2, 320, shape)}  # 1 pads
    lengths = torch.tensor(LENGTHS)[:, None]
    rows["attention_mask"] = (torch.arange(shape[1]) < lengths).long()
    rows["input_ids"] = rows["input_ids"].where(rows["attention_mask"] == 1, 1)
    if n_types == 2:
        rows["token_type_ids"] = torch.randint(2, shape)
    return rows


def pooled(checkpoint: Checkpoint, rows: dict[str, Tensor]) -> Tensor:
    lengths = rows["attention_mask"].sum(dim=1)
    return checkpoint.decoder.encode(rows["input_ids"], lengths, rows.get("token_type_ids"))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "qwen3"])
@torch.inference_mode()
def test_vectors_of_tokens(name: str, tmp_path: Path) -> None:
    model = make_encoder(name)
    checkpoint = load_checkpoint(save(tmp_path, model))
    rows = random_rows(checkpoint.config.n_token_types)
    theirs, within = model(**rows).last_hidden_state, rows["attention_mask"] == 1
    lengths, types = torch.tensor(LENGTHS), rows.get("token_type_ids")
    ours = checkpoint.decoder.hidden(rows["input_ids"], lengths, types)
    close(ours[within], theirs[within])
    # Without a word on pooling it is the mean.
    means = [row[:length].mean(dim=0) for row, length in zip(theirs, LENGTHS, strict=True)]
    close(pooled(checkpoint, rows), torch.stack(means))


@pytest.mark.parametrize("name", CLASSIFIERS)
@torch.inference_mode()
def test_scores_of_labels(name: str, tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "entailment", 2: "neutral"}
    model = make_encoder(name, "ForSequenceClassification", id2label=labels)
    checkpoint = load_checkpoint(save(tmp_path, model))
    pooling = checkpoint.config.pooling
    assert pooling is not None
    assert pooling.labels == tuple(labels.values())
    assert pooling.label_activation == "softmax"
    rows = random_rows(checkpoint.config.n_token_types)
    close(pooled(checkpoint, rows), model(**rows).logits)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
            "identity",
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Identity"},
            "identity",
        ),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
    ],
)
def test_activations_of_labels(changes: dict[str, Any], activation: str, tmp_path: Path) -> None:
    model = make_encoder("bert", "ForSequenceClassification", **changes)
    pooling = load_checkpoint(save(tmp_path, model)).config.pooling
    assert pooling is not None
    assert pooling.label_activation == activation
    assert pooling.projections == (
        Projection(d_out=64, activation="tanh"),
        Projection(d_out=changes["num_labels"]),
    )


def test_published_keys_of_nomic() -> None:
    """They are not those of transformers' own class."""
    published = {
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "n_positions": 8192,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "use_rms_norm": None,
        "type_vocab_size": 2,
    }
    config = encoders.ENCODERS["nomic_bert"].config(published, bos_token_id=None, eos_token_ids=[])
    expected = {"max_model_len": 8192, "rope_theta": 1000.0, "feed_forward": "swiglu"}
    expected |= {"d_ff": 3072, "norm_placement": "post", "qkv_bias": False, "n_token_types": 2}
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["layer_norm_epsilon", "layer_norm_eps"])
def test_both_names_of_an_epsilon(key: str) -> None:
    family = encoders.ENCODERS["nomic_bert"]
    assert family.config({key: 1e-3}, bos_token_id=None, eos_token_ids=[]).norm_eps == 1e-3


def test_the_head_of_a_masked_language_model_is_left_out(tmp_path: Path) -> None:
    model = make_encoder("bert", "ForMaskedLM")
    config = load_checkpoint(save(tmp_path, model)).config
    assert config.pooling == Pooling(kind="mean")


def test_norms_may_have_their_names_of_tensorflow(tmp_path: Path) -> None:
    model = make_encoder("bert")
    save(tmp_path, model)
    expected = load_checkpoint(tmp_path).decoder.state_dict()
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for theirs, former in ends.items():
            tensors = {name.replace(theirs, former): tensor for name, tensor in tensors.items()}
        return tensors | {"embeddings.position_ids": torch.arange(64)[None]}

    set_tensors(tmp_path, rename)
    found = load_checkpoint(tmp_path).decoder.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# sentence-transformers folders

_TYPE = "sentence_transformers.models."


MEAN = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
TANH = "torch.nn.modules.activation.Tanh"
DENSE = {"in_features": 64, "out_features": 16, "bias": True, "activation_function": TANH}


def save_modules(folder: Path, **configs: dict[str, Any]) -> None:
    """Write modules.json and each module's folder; a Dense gets weights."""
    listed = [{"path": "", "type": f"{_TYPE}Transformer"}]
    for i, (kind, config) in enumerate(configs.items(), 1):
        path = f"{i}_{kind}"
        listed.append({"path": path, "type": _TYPE + kind})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            tensors = {"linear.weight": torch.ones(16, 64), "linear.bias": torch.ones(16)}
            save_file(tensors, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("theirs"), make_encoder("bert"))


@pytest.fixture
def bert(saved: Path, tmp_path: Path) -> Path:
    """A whole folder, to be changed."""
    return shutil.copytree(saved, tmp_path / "bert")


@torch.inference_mode()
def test_a_decoder_that_embeds(tmp_path: Path) -> None:
    model = make_encoder("qwen3")
    folder = save(tmp_path, model)
    save_modules(folder, Pooling={"pooling_mode": "lasttoken"}, Normalize={})
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.causal
    rows = random_rows(None)
    theirs = model(**rows).last_hidden_state[torch.arange(3), torch.tensor(LENGTHS) - 1]
    close(pooled(checkpoint, rows), torch.nn.functional.normalize(theirs))


def test_the_longest_text_and_the_prompts(bert: Path) -> None:
    save_modules(bert, Pooling=MEAN)
    whole = load_checkpoint(bert)
    set_values(bert, "sentence_bert_config.json", max_seq_length=48, do_lower_case=True)
    prompts = {"query": "query: ", "document": ""}
    set_values(
        bert,
        "config_sentence_transformers.json",
        __version__={"pytorch": "1"},
        prompts=prompts,
        default_prompt_name="query",
        similarity_fn_name="dot",
    )
    found = load_checkpoint(bert)
    assert found.config.max_model_len == 48
    name = "position_embedding.weight"
    assert torch.equal(found.weights[name], whole.weights[name][:48])
    assert EmbeddingDefaults.parse(found.extra_files) == EmbeddingDefaults(
        prompts=prompts, default_prompt_name="query", similarity_fn_name="dot"
    )
    assert found.tokenizer.encode("A LINE").ids == whole.tokenizer.encode("a line").ids


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("config.json", {"architectures": ["BertForTokenClassification"]}, "supported are"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode is 'max'"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode is "),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual is True"),
        ("2_Dense/config.json", {"activation_function": "custom.Act"}, "activation_function"),
        ("2_Dense/config.json", {"out_features": 17}, "has shape"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length is 'many'"),
        ("sentence_bert_config.json", {"max_seq_length": math.nan}, "max_seq_length is nan"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "prompts.query"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "'x' has no prompt"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "x"}, "similarity_fn_name"),
    ],
)
def test_refusals_name_the_file_and_the_key(
    file: str, values: dict[str, Any], message: str, bert: Path
) -> None:
    save_modules(bert, Pooling=MEAN, Dense=DENSE, Normalize={})
    set_values(bert, file, **values)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_checkpoint(bert)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("longest", "expected"), [(math.inf, 64), (40, 40)])
def test_a_tokenizer_may_say_how_long_texts_are(longest: float, expected: int, bert: Path) -> None:
    save_modules(bert, Pooling=MEAN)
    set_values(bert, "tokenizer_config.json", model_max_length=longest)
    assert load_checkpoint(bert).config.max_model_len == expected


def test_a_reranker_whose_settings_are_no_object_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, make_encoder("bert", "ForSequenceClassification", num_labels=1))
    set_values(folder, "config.json", sentence_transformers="5.0")
    with pytest.raises(CheckpointError, match=r"sentence_transformers is '5\.0'.*an object"):
        load_checkpoint(folder)


BODY = ("", "Transformer")
OUTSIDE, OTHERS = "Kvasir computes what is in the folder", "perhaps Normalize"


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        *(
            ([BODY, (path, "Pooling")], OUTSIDE)
            for path in ("", "..", "../1_Pooling", "/1_Pooling")
        ),
        ([BODY], OTHERS),
        ([BODY, ("1", "Pooling"), ("2", "Normalize"), ("3", "Dense")], OTHERS),
        ([BODY, ("1", "WordWeights"), ("2", "Pooling")], OTHERS),
    ],
)
def test_other_modules_are_refused(
    modules: list[tuple[str, str]], message: str, bert: Path
) -> None:
    listed = [{"path": path, "type": kind} for path, kind in modules]
    (bert / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(bert)
