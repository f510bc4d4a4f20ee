"""The chart's files against the server's settings. Rendering is for `make validate`, which needs Helm's engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from server.settings import PREFIX, Settings, load_settings

CHART = Path(__file__).parent.parent / "helm"
OF_THE_CHART = {"host", "port", "model", "served_model_name", "api_key", "api_key_file", "drain_timeout"}


def test_the_schema_knows_every_setting_that_the_chart_does_not_set_itself() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"]["settings"]["properties"].keys() == Settings.model_fields.keys() - OF_THE_CHART


@pytest.mark.parametrize("path", sorted(CHART.glob("ci/*.yaml")), ids=lambda path: path.stem)
def test_settings_of_the_examples_are_taken_from_the_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("settings", {})
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name.upper(), ",".join(value) if isinstance(value, list) else str(value))
    settings = load_settings(model=CHART, api_key="sesame")
    assert settings.model_fields_set == {"model", "api_key", *given}
