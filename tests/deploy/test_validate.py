"""The checks that need no tool: they find the faults in files without templates."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir.server.settings import load_settings
from tests.deploy import validate
from tests.deploy.chart import quantity
from tests.deploy.checking import ROOT, SkippedError, parse
from tests.deploy.compose_files import interpolate
from tests.deploy.mutations import MUTATIONS, caught_by
from tests.deploy.validate import FILE_CHECKS

PLAIN = re.compile(
    r"docker-compose.*|Dockerfile|helm/(Chart|values-gpu|kserve)\.yaml|.*\.schema\.json"
)
OF_FILES = [one for one in MUTATIONS if PLAIN.fullmatch(one["file"]) and "Kuber" not in one["name"]]


@pytest.mark.parametrize("check", FILE_CHECKS, ids=lambda check: str(check.__name__))
def test_the_files_pass(check: Callable[[Path], str]) -> None:
    check(ROOT)


@pytest.mark.parametrize("mutation", OF_FILES, ids=lambda mutation: str(mutation["name"]))
def test_a_fault_is_found(mutation: dict[str, str]) -> None:
    assert caught_by(mutation, FILE_CHECKS)


def test_faults_fit_their_files() -> None:
    """Of those in templates, too, which `python -m tests.deploy.mutations` puts in."""
    for one in MUTATIONS:
        assert one["old"] in (ROOT / one["file"]).read_text(encoding="utf-8"), one["name"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("500m", 0.5), ("2", 2), ("1k", 1e3), ("1E", 1e18), ("1Ki", 1024), ("1.5Pi", 1.5 * 2**50)],
)
def test_quantities_are_parsed_as_by_kubernetes(text: str, wanted: float) -> None:
    assert quantity(text) == pytest.approx(wanted)


@pytest.mark.parametrize("model", ["./artifacts/mine", "/srv/mine", "../mine"])
def test_compose_serves_a_directory_under_its_name(model: str) -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    given = re.sub(r"\$\{MODEL:-[^}]*\}", model, text)
    server = parse(interpolate(given))["services"]["server"]
    told = server["environment"]
    (volume,) = server["volumes"]
    assert (volume["source"], volume["target"]) == (model, told["KVASIR_MODEL"])
    name = told["KVASIR_SERVED_MODEL_NAME"] or None
    settings = load_settings(model=[told["KVASIR_MODEL"]], served_model_name=name)
    assert settings.model_name == "mine"


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--strict"], 1)])
def test_a_skipped_check_fails_only_if_strict(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(root: Path) -> str:
        raise SkippedError(f"nothing to check in {root}")

    monkeypatch.setattr(validate, "CHECKS", [check])
    monkeypatch.setattr(sys, "argv", ["validate", *arguments])
    assert validate.main() == code
