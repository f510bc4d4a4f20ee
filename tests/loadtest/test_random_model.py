"""`kvasir bench model` writes directories that the server loads, once for each exporter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.__main__ import app
from kvasir.loadtest import random_model
from kvasir.model.directory import load_model_dir


def test_the_model_is_kept_until_the_exporter_changes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(tiny_model, tmp_path / "tiny")
    arguments = ["bench", "model", "--preset", "tiny", "--precision", "int8", "--out", str(out)]
    assert load_model_dir(out).manifest.precision == "int8"
    exported = list[str]()

    def export(run: Path, to: Path, **_: object) -> None:
        assert not to.exists()
        exported.append(run.name)

    monkeypatch.setattr(random_model, "export_checkpoint", export)
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert (json.loads(again.stdout), exported) == ({"directory": str(out)}, [])
    monkeypatch.setattr(random_model, "_fingerprint", lambda _: "changed")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [name.endswith("-changed") for name in exported] == [True]


def test_another_directory_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    result = CliRunner().invoke(app, ["bench", "model", "--preset", "tiny", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"kvasir: {tmp_path} is not empty")
    assert precious.exists()


def test_every_token_of_the_dummy_tokenizer_shows_and_any_text_round_trips() -> None:
    """A token without text would make no event, and the figures would take it for a pause."""
    tokenizer = random_model.dummy_tokenizer(1000)
    assert tokenizer.get_vocab_size() == 1000
    assert all(tokenizer.decode([token_id]) for token_id in range(1, 1000))
    assert tokenizer.decode(tokenizer.encode("Grüße, def f(x):\n").ids) == "Grüße, def f(x):\n"
