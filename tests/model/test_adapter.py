"""Adapters against peft: names, logits, merged matrices; runs that are resumed; refusals."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.model.adapters.config import AdapterConfig, AdapterError
from kvasir.model.checkpoint import load_checkpoint
from kvasir.model.directory import newest_checkpoint
from kvasir.model.training import run
from kvasir.model.training.adapter import open_adapter
from kvasir.model.training.distributed import one_process
from kvasir.model.training.flops import flops_per_token
from tests.kit.adapters import set_config
from tests.kit.huggingface_checkpoints import TEXT, close, make_model, save_checkpoint
from tests.kit.training_runs import kvasir_train, metrics, trained, undrawn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model

# peft reads what transformers will rename.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
# Linear layers that are transposed, interleaved by head, stacked, and scaled; the layouts of all
# importers are in test_adapter_layout.py.
FAMILIES = ("gpt2", "gpt_neox", "phi3", "granite")
ROWS = torch.arange(60).view(2, 30) * 5 % 250
STEPS = ["--context=16", "--batch-size=2", "--steps=4", "--warmup=1", "--learning-rate=0.1"]

without_pictures = pytest.fixture(scope="module", autouse=True)(undrawn)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, a text, and a run of four steps of an adapter beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(folder / "llama", make_model("llama"))
    (folder / "text.txt").write_text(TEXT)
    options = ["--init", str(folder / "llama"), "--lora", "r=4,alpha=6,rslora"]
    trained(str(folder / "text.txt"), *options, "--out", str(folder / "run"), *STEPS)
    return folder


def newest(folder: Path) -> Path:
    step = newest_checkpoint(folder)
    assert step is not None
    return step


def of_transformers(folder: Path) -> Any:
    make: Any = transformers.AutoModelForCausalLM
    return make.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    made = model(ROWS)
    whole: Tensor = made if isinstance(made, Tensor) else made.logits
    return whole


def merge(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)], catch_exceptions=False)
    return result.stdout if result.exit_code == 0 else result.stderr.removeprefix("kvasir: ")


# Against peft


def test_peft_reads_what_a_run_writes(place: Path) -> None:
    step, base = newest(place / "run"), of_transformers(place / "llama")
    before = logits(base)
    theirs = logits(PeftModel.from_pretrained(base, step))
    assert (theirs - before).abs().max() > 0.1 * before.std()
    close(logits(open_adapter(step).decoder), theirs)
    assert json.loads((step / "adapter_config.json").read_text())["target_modules"] == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_merging_is_what_peft_computes(name: str, tmp_path: Path) -> None:
    """Of an adapter that peft made, with ranks and alphas of their own."""
    model = make_model(name)
    save_checkpoint(tmp_path / "base", model)
    heads, kinds = {"lm_head", "embed_out"}, (nn.Linear, transformers.pytorch_utils.Conv1D)
    named = model.named_modules()
    linear = {m.rpartition(".")[2] for m, layer in named if isinstance(layer, kinds)} - heads
    first, *_ = sorted(linear)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=sorted(linear), init_lora_weights=False,
        rank_pattern={first: 2}, alpha_pattern={first: 7},
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = logits(adapted)
    assert "wrote" in merge(tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out")
    close(logits(load_checkpoint(tmp_path / "out").decoder), expected)


def test_a_run_is_merged_into_its_model(place: Path, tmp_path: Path) -> None:
    for out, adapter in (("a", place / "run"), ("b", newest(place / "run"))):
        assert "wrote" in merge(place / "llama", adapter, "--out", tmp_path / out)
        merged = load_checkpoint(tmp_path / out)
        close(logits(merged.decoder), logits(open_adapter(newest(place / "run")).decoder))
        assert merged.extra_files["chat_template.jinja"]


def test_a_checkpoint_of_ours_has_our_names(place: Path, tmp_path: Path) -> None:
    text, base, out = (str(tmp_path / name) for name in ("text.txt", "base", "run"))
    shutil.copy(place / "text.txt", text)
    small = ["--set=n_layer=1", "--set=d_model=32", "--set=vocab_size=270", "--context=16"]
    trained(text, "--out", base, *small, "--batch-size=2", "--steps=1")
    trained(text, "--init", base, "--lora", "r=2,modules=qkv+down", "--out", out, *STEPS)
    assert {
        name.split(".lora_")[0]
        for name in load_file(newest(Path(out)) / "adapter_model.safetensors")
    } == {
        f"base_model.model.blocks.0.{module}" for module in ("attention.qkv", "feed_forward.down")
    }
    assert "wrote" in merge(base, out, "--out", tmp_path / "merged")
    merged = load_checkpoint(tmp_path / "merged").decoder
    close(logits(merged), logits(open_adapter(newest(Path(out))).decoder))


# Runs


def test_a_run_that_is_stopped_at_every_step_ends_in_the_same_bits(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--init", str(place / "llama"), "--lora", "r=4,alpha=6,rslora", *STEPS]
    with monkeypatch.context() as patch:  # nothing but the preparation
        patch.setattr(run, "train_run", lambda *_: True)
        trained(str(place / "text.txt"), *options, "--out", str(tmp_path))

    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    for step in range(1, 5):
        torch.manual_seed(step)
        assert run.open_run(tmp_path, one_process()).train(tmp_path, stop) == (step == 4)
    assert metrics(tmp_path) == metrics(place / "run")
    ours, whole = (
        load_file(newest(f) / "adapter_model.safetensors") for f in (tmp_path, place / "run")
    )
    assert all(torch.equal(tensor, whole[name]) for name, tensor in ours.items())
    base = load_checkpoint(place / "llama").decoder.state_dict()
    inside = open_adapter(newest(tmp_path)).decoder.state_dict()
    inside = {name.replace(".base.", "."): tensor for name, tensor in inside.items()}
    assert all(torch.equal(inside[name], tensor) for name, tensor in base.items())


def test_frozen_matrices_cost_two_products_and_not_three(place: Path) -> None:
    full = load_checkpoint(place / "llama").decoder
    adapted = open_adapter(newest(place / "run")).decoder
    n_trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    matrices = flops_per_token(full, 0) // 6
    assert flops_per_token(adapted, 0) == 4 * matrices + 6 * n_trained


def test_a_run_is_refused_without_its_own_model(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    save_checkpoint(tmp_path / "llama", make_model("llama", tie_word_embeddings=True))
    path = newest(tmp_path / "run") / "training.json"
    progress = json.loads(path.read_text())
    progress["base"]["path"] = str(tmp_path / "llama")
    path.write_text(json.dumps(progress))
    result = kvasir_train("--resume", "--out", str(tmp_path / "run"))
    assert "is not the model that" in result.stderr


# Refusals


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("r=0", "r must be greater than 0, not '0'; try r=16"),
        ("alpha=3", "lacks the field 'r'"),
        ("r=1.5", "r must be a valid integer"),
        ("r=9999", "less than or equal to 4096"),
        ("r=4,alpha=nan", "lora_alpha must be a finite number, not 'nan'"),
        ("r=4,dora", "--lora knows no 'dora'; did you mean 'rslora'?"),
        ("r=4,rslora=maybe", "use_rslora must be a valid boolean"),
    ],
)
def test_a_description_that_is_none(text: str, complaint: str) -> None:
    with pytest.raises(AdapterError) as error:
        AdapterConfig.parse(text, "base")
    assert complaint in str(error.value)


def test_an_adapter_that_cannot_be_trained(place: Path, tmp_path: Path) -> None:
    text, out = str(place / "text.txt"), ["--out", str(tmp_path / "run"), *STEPS]
    lora = ["--init", str(place / "llama"), "--lora"]
    for options, complaint in (
        (["--lora", "r=4"], "name that with --init"),
        (
            [*lora, "r=4,modules=q_prj"],
            "has no module 'q_prj' for an adapter; did you mean 'q_proj'?",
        ),
    ):
        result = kvasir_train(text, *options, *out)
        assert result.exit_code == 1
        assert complaint in result.stderr.splitlines()[-1]
        assert not (tmp_path / "run").exists()


def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path
) -> None:
    """test_peft.py has what is refused."""
    shutil.copytree(newest(place / "run"), tmp_path / "adapter")
    set_config(tmp_path / "adapter", r=5)
    told = merge(place / "llama", tmp_path / "adapter", "--out", tmp_path / "out")
    assert "expected shape (5, " in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_adapter_or_no_model(place: Path, tmp_path: Path) -> None:
    llama, adapter = place / "llama", newest(place / "run")
    told = merge(llama, llama, "--out", tmp_path / "a")
    assert "is no adapter: there is no adapter_config.json" in told
    assert "is a LoRA adapter of" in merge(adapter, adapter, "--out", tmp_path / "b")
    assert "kvasir merge" in merge(place / "run", adapter, "--out", tmp_path / "c")
