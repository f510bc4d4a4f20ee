"""The chart's files against the server. Only `make validate` renders them, with Helm's engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvasir.server.api.routes import ROUTES
from kvasir.server.errors import StartupError
from kvasir.server.settings import PREFIX, load_settings
from tests.deploy.chart_relations import INTERNAL, is_below
from tests.deploy.helm_schema import settings_schema
from tests.kit.fake_encoder import encoder_app, encoder_model_dir
from tests.kit.live import KEY, Live, live, live_app

CHART = Path(__file__).parents[2] / "helm"
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
PATHS = {route.path for route in ROUTES}


def as_environment(value: object) -> str:
    """Write a setting as the Deployment does."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


SAMPLES: dict[str, list[object]] = {
    "boolean": [False, True],
    "integer": [3, 4096, 2**40],
    "number": [-1.5, 0.25, 3],
    "string": [
        "2GiB", "64 mb", "1.5k", "2Gi", "-1MB", "MiB", "much", "/llm", "llm", "/a/", "http://a/b",
        "a:4318", "1h30m", "tcp://*:5557",
    ],
    "array": [["https://a.example"], ["*", "http://b:1"], ["a.example"], ["https://a.example/x"],
        ["poet=/adapters/poet"]],
}  # fmt: skip


def candidates(of: dict[str, Any]) -> Iterator[object]:
    """Yield values of a setting's types, at the bounds of its schema and elsewhere."""
    for branch in of.get("anyOf", [of]):
        for bound in {"minimum", "exclusiveMinimum", "maximum"} & branch.keys():
            yield from (branch[bound] - 1, branch[bound], branch[bound] + 1)
        yield from SAMPLES[branch["type"]]
    yield from of.get("enum", ())


@pytest.mark.parametrize("name", settings_schema())
def test_chart_and_server_accept_the_same_settings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SCHEMA["properties"]["settings"]["properties"][name]
    decisions = set()
    monkeypatch.setenv(f"{PREFIX}KV_EVENTS", "tcp://*:5557")  # which kv_events_replay needs
    for value in candidates(of):
        monkeypatch.setenv(PREFIX + name.upper(), as_environment(value))
        try:
            load_settings(model=CHART, api_key="sesame")
            accepted = True
        except StartupError:
            accepted = False
        assert jsonschema.Draft7Validator(of).is_valid(value) == accepted, value
        decisions.add(accepted)
    is_free = of.get("type") == "boolean" or of.get("format") == "path"
    assert decisions == ({True} if is_free else {True, False})


def test_the_page_needs_only_public_routes_and_three_others() -> None:
    paths = Path("server/static").rglob("*.js")
    scripts = "".join(path.read_text(encoding="utf-8") for path in paths)
    asked = {f"/{name}" for name in re.findall(r"[\"'`]([a-z0-9_/]+)[\"'`]", scripts)} & PATHS
    assert "/v1/completions" in asked
    hidden = {path for path in asked if path == "/explain" or is_below(path, INTERNAL)}
    assert hidden == {"/metrics", "/debug/batch", "/explain"}


def run_chart_test(server: Live, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files/completion.py")]
    environment |= {"URL": server.url}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_chart_s_test_reads_its_key_from_any_legal_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with live() as server:
        for content in (f"# of the team\n\n  {KEY} \nanother\n", f"\ufeff{KEY}"):
            path.write_text(content, encoding="utf-8")
            done = run_chart_test(server, KEY_FILE=str(path))
            assert done.returncode == 0, done.stderr
            assert "the server answers" in done.stdout


@pytest.mark.parametrize("labels", [(), ("relevant",)])
def test_the_chart_s_test_asks_an_encoder_for_what_it_does(labels: tuple[str, ...]) -> None:
    app, runner = encoder_app(encoder_model_dir(labels))
    with live_app(app) as server:
        done = run_chart_test(server)
    assert done.returncode == 0, done.stderr
    assert len(runner.texts) == 1
