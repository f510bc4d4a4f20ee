"""Settings from options and the environment; every mistake is one line that names the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.server.errors import StartupError
from kvasir.server.process.app import secret_of
from kvasir.server.settings import Settings, load_settings


def test_options_win_over_the_environment_and_defaults_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVASIR_PORT", "9000")
    monkeypatch.setenv("KVASIR_MAX_NUM_SEQS", "3")
    settings = load_settings(model=Path("artifacts/mine"), port=9001, host=None)
    assert (settings.port, settings.max_num_seqs, settings.host) == (9001, 3, "127.0.0.1")
    assert settings.queue_limit == 12
    assert settings.model_name == "mine"


@pytest.mark.parametrize("source", ["option", "environment"])
def test_several_models_have_the_names_of_their_directories_or_given_ones(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    given = ["models/one", "org/two=models/one", "a=b"]
    if source == "environment":
        monkeypatch.setenv("KVASIR_MODEL", ", ".join(given))
        settings = load_settings()
    else:
        settings = load_settings(model=given)
    assert settings.models == {
        "one": Path("models/one"),
        "org/two": Path("models/one"),
        "a=b": Path("a=b"),
    }
    assert settings.model_name == "one"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": ["x/same", "y/same"]}, "x/same, y/same"),
        ({"model": ["same=x", "same=y"]}, "same=x, same=y"),
        ({"model": ["x", "y"], "served_model_name": "z"}, "served_model_name"),
    ],
)
def test_models_of_one_name_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named) as caught:
        load_settings(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"), [("2GiB", 2 * 2**30), ("500MB", 500_000_000), ("4096", 4096), ("0", 0)]
)
def test_memory_sizes_take_units(given: str, expected: int) -> None:
    assert load_settings(model="m", prefix_cache_memory=given).prefix_cache_memory == expected


def test_every_setting_is_documented() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("PORT", "http"),
        ("CHUNK_SIZE", "1"),
        ("KV_CACHE_MEMORY", "lots"),
        ("PREFIX_CACHE_MEMORY", "-1"),
        ("DRAIN_TIMEOUT", "nan"),
        ("SEND_TIMEOUT", "0"),
        ("CORS_ORIGINS", "https://a.example/"),
        ("CORS_ORIGINS", "a.example"),
        ("ALLOWED_HOSTS", "a.example:8000"),
        ("ALLOWED_HOSTS", "http://a.example"),
        ("ALLOWED_HOSTS", "a.*"),
        ("LOG_LEVEL", "loud"),
        ("ROOT_PATH", "llm/"),
    ],
)
def test_a_bad_value_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"KVASIR_{name}", value)
    with pytest.raises(StartupError) as caught:
        load_settings(model="m")
    message = str(caught.value)
    assert f"KVASIR_{name}" in message
    assert repr(value) in message
    assert "\n" not in message


def test_unknown_and_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="KVASIR_MODEL"):
        load_settings()
    with pytest.raises(StartupError, match="prot"):
        load_settings(model="m", prot=1)
    monkeypatch.setenv("KVASIR_PROT", "9000")
    with pytest.raises(StartupError, match=r"KVASIR_PROT.*; did you mean KVASIR_PORT"):
        load_settings(model="m")


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(load_settings(model="m", api_key="secret"))


def test_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_CORS_ORIGINS", "https://a.example, http://localhost:3000")
    assert load_settings(model="m").cors_origins == ("https://a.example", "http://localhost:3000")
    assert load_settings(model="m", cors_origins="*").cors_origins == ("*",)


def test_the_queues_bounds_follow_one_another() -> None:
    assert load_settings(model="m", max_num_seqs=2).queue_tokens_limit == 2 * 4 * 4096
    assert load_settings(model="m", max_queue=3).queue_tokens_limit == 3 * 4096


def test_a_secret_may_stand_in_a_file_but_not_in_two_places(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    given = load_settings(model=Path("a"), salt="from the setting")
    assert secret_of(given, "salt") == "from the setting"
    assert "from the setting" not in repr(given)
    settings = load_settings(model=Path("a"), salt_file=path)
    for content, fault in ((None, "no such file"), (b"\xff", "utf-8"), (b" \n", "empty")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(StartupError, match=fault):
            secret_of(settings, "salt")
    path.write_text("from a file\n")
    assert secret_of(settings, "salt") == "from a file"
    with pytest.raises(StartupError, match="give one of them"):
        secret_of(load_settings(model=Path("a"), salt="other", salt_file=path), "salt")
