"""Checkpoints: saved and loaded bit for bit, kept through failures, misfits named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvasir.model import checkpoint
from kvasir.model.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
)
from kvasir.model.network.transformer import Transformer
from kvasir.model.tokenizer import train_tokenizer
from tests.kit.random_models import make_config, make_decoder

tokenizer = train_tokenizer(["some text to count pairs in"], 270)
STATE = {"x/exp_avg": torch.arange(6.0).view(2, 3)}


FILES = {
    "chat_template.jinja": b"{{ x }}",
    "special_tokens_map.json": b"{}",
    "generation_config.json": b"{ }",
}


def save(run: Path, step: int, seed: int = 0, **changes: Any) -> Path:
    decoder = make_decoder(make_config(**{"n_layer": 1, **changes}), seed)
    return save_checkpoint(run, step, decoder, tokenizer, STATE, {"note": step}, extra_files=FILES)


def weights_equal(first: Transformer, second: Transformer) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False, "position": "learned", "norm": "layernorm", "qkv_bias": True}],
    ids=["tied", "untied with biases"],
)
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save(tmp_path / "run", 12, seed=3, **changes)
    assert path == tmp_path / "run" / "step-00000012"
    assert {file.suffix for file in path.iterdir()} == {".jinja", ".json", ".safetensors"}
    for directory in (tmp_path / "run", path):  # a run stands for its newest checkpoint
        loaded = load_checkpoint(directory)
        assert loaded.path == path
        config = make_config(n_layer=1, **changes)
        assert loaded.decoder.config == config
        assert weights_equal(loaded.decoder, make_decoder(config, 3))
        assert not loaded.decoder.training
        assert loaded.tokenizer.to_str() == tokenizer.to_str()
        assert loaded.progress == {"note": 12, "step": 12}
        assert loaded.extra_files == FILES
        state = load_state(loaded.path)
        assert state.keys() == STATE.keys()
        assert torch.equal(state["x/exp_avg"], STATE["x/exp_avg"])


def test_a_loaded_state_outlives_its_file(tmp_path: Path) -> None:
    """Saving the next checkpoint removes the files that a resumed state was read from."""
    path = save(tmp_path, 1)
    state = load_state(path)
    save(tmp_path, 2)
    assert not path.exists()
    state["x/exp_avg"].add_(1)
    assert torch.equal(state["x/exp_avg"], STATE["x/exp_avg"] + 1)


def test_the_newest_wins_and_older_ones_go(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}"]
    (tmp_path / "step-00000007").mkdir()  # a removal that was cut off
    assert find_checkpoint(tmp_path).name == "step-00000100"


def test_a_half_written_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-00000009.part-x" / "step-00000009").mkdir(parents=True)
    assert load_checkpoint(tmp_path).progress["step"] == 5
    save(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def full_at(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    """A way of writing that fails for the file of this name."""

    def write_unless_full(*args: Any, **options: Any) -> Any:
        if any(isinstance(arg, Path) and arg.name == name for arg in args):
            full()
        return write(*args, **options)

    return write_unless_full


class FullTokenizer:
    save = full


def test_a_failure_in_the_middle_of_saving_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected at each file that a checkpoint is made of, as a full disk would."""
    save(tmp_path, 5, seed=1)
    decoder = make_decoder(make_config(n_layer=1), 2)
    files = ("config.json", "tokenizer.json", "model.safetensors", "training.safetensors")
    for fails_at in (*files, "training.json", "rename"):
        broken: Any = FullTokenizer() if fails_at == "tokenizer.json" else tokenizer
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full_at(fails_at, Path.write_text))
            patch.setattr(checkpoint, "save_file", full_at(fails_at, save_file))
            patch.setattr(Path, "rename", full if fails_at == "rename" else Path.rename)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path, 6, decoder, broken, STATE, {})
        loaded = load_checkpoint(tmp_path)
        assert loaded.progress["step"] == 5
        assert weights_equal(loaded.decoder, make_decoder(make_config(n_layer=1), 1))
    save(tmp_path, 6, seed=2)
    assert load_checkpoint(tmp_path).progress["step"] == 6


def test_a_kill_between_the_rename_and_the_removal_leaves_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5, seed=1)

    def killed(path: str | Path, **_: object) -> None:
        if Path(path).name == "step-00000005":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 6, seed=2)
    assert load_checkpoint(tmp_path).progress["step"] == 6


def test_saving_the_same_step_twice_keeps_the_first(tmp_path: Path) -> None:
    """As a run does that Ctrl-C ended right after a checkpoint; it must not remove its only one."""
    save(tmp_path, 5)
    save(tmp_path, 5)
    shards = tmp_path / "step-00000005.training.part"
    shards.mkdir()
    save_checkpoint(tmp_path, 5, make_decoder(make_config()), tokenizer, shards, {})
    assert load_checkpoint(tmp_path).progress["step"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power after the renaming would otherwise leave empty files and no older step."""
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check(source: Path, target: Path) -> Path:
        if target.name == "step-00000006":
            assert {path.stat().st_ino for path in (source, *source.rglob("*"))} <= synced
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    save(tmp_path, 5)
    shards = tmp_path / "step-00000006.training.part"
    shards.mkdir()
    save_file(STATE, shards / "shard.safetensors")
    path = save_checkpoint(tmp_path, 6, make_decoder(make_config()), tokenizer, shards, {})
    assert (path / "training" / "shard.safetensors").is_file()
    assert tmp_path.stat().st_ino in synced
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("norm.weight"), r"lacks tensor 'norm\.weight' for its config"),
        (  # beside tied embeddings, say: loading without it would be another model
            lambda weights: weights.update({"head.weight": torch.zeros(300, 48)}),
            r"holds the unknown tensor 'head\.weight'",
        ),
        (
            lambda weights: weights.update({"norm.weight": torch.zeros(47)}),
            r"'norm\.weight' in .* has shape \[47\], not \[48\]$",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    file = save(tmp_path, 1) / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "training.json"]
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    content = (path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b"\xff" * 100, None):
        if damaged is not None:
            (path / name).write_bytes(damaged)
        elif name == "training.json":  # which is optional
            continue
        else:
            (path / name).unlink()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_without_training_state_loads_but_cannot_be_resumed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "training.safetensors").unlink()
    (path / "training.json").unlink()
    assert load_checkpoint(tmp_path).progress == {}
    with pytest.raises(CheckpointError, match=r"has no training\.safetensors"):
        load_state(path)
    (path / "training.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(CheckpointError, match=r"training\.safetensors cannot be loaded: "):
        load_state(path)


@pytest.mark.parametrize("entries", [None, [], ["step-00000009.part"], ["step-00000009.part-x"]])
def test_a_directory_without_a_checkpoint_says_how_to_make_one(
    entries: list[str] | None, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    for name in entries or ():
        (directory / name).mkdir(parents=True)
    if entries == []:
        directory.mkdir()
    with pytest.raises(
        CheckpointError, match=r"(holds no checkpoint, .*|not exist); make one with: kvasir train"
    ):
        load_checkpoint(directory)


@pytest.mark.parametrize("position", ["rotary", "learned", "relative"])
def test_a_shorter_decoder_computes_the_same(position: str, tmp_path: Path) -> None:
    decoder = make_decoder(make_config(position=position, n_kv_head=4))
    save_checkpoint(tmp_path, 1, decoder, tokenizer, STATE, {})
    shorter = load_checkpoint(tmp_path, max_model_len=24).decoder
    assert shorter.config == replace(decoder.config, max_model_len=24)
    input_ids = torch.randint(decoder.config.vocab_size, (1, 24))
    with torch.inference_mode():
        torch.testing.assert_close(shorter(input_ids), decoder(input_ids))


@pytest.mark.parametrize("length", [1, 97])
def test_a_length_that_the_decoder_cannot_have_is_refused(length: int, tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"from 2 to the model's own 96, not {length}"):
        load_checkpoint(tmp_path, max_model_len=length)
