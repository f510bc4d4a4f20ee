"""The rules, alerts and dashboards, checked with promtool and against a running server."""

from __future__ import annotations

import json
import re
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

from kvasir.server.telemetry.server_metrics import _ADAPTERS, _MODELS
from tests.deploy.chart import one
from tests.deploy.checking import FailedError, fail_on_first, load, rendered, run_tool, server_url
from tests.deploy.compose_files import seconds
from tests.deploy.shapes import SHAPES, misfits, walk

RULES = "helm/alerts/kvasir.rules.yaml"
METRIC = re.compile(r"(?<![:\w])(?:kvasir|process)_[a-z0-9_]+\b")  # not in a recording rule's name
SELECTOR = re.compile(r"\b((?:kvasir|process)_[a-z0-9_]+)\{([^{}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*[\\]?[\"']")
GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([\w\s,]*)\)")
VARIABLE = re.compile(r"label_values\((\w+)(?:\{[^{}]*\})?,\s*(\w+)\)")  # Grafana's
# Labels that Prometheus adds, the last one to ALERTS.
OF_THE_TARGET = {"namespace", "job", "pod", "instance", "alertstate"}
# An attribute of Locust, an option of subprocess, and the metric that prometheus-adapter computes.
ELSEWHERE = {"process_exit_code", "process_group", "kvasir_requests_in_system"}
# Metrics of adapters and of a folder of models: the checked server has neither.
ELSEWHERE |= {
    f"kvasir_{name}"
    for name in (*_ADAPTERS, *_MODELS, "adapter_requests_total", "model_loads_total")
}
TEXTS = (
    "README.md", "docs/*.md", "docker-compose*.yml", "helm/**/*", "server/static/**/*",
    "loadtest/**/*.py",
)  # fmt: skip
LONGEST_SCRAPE = 60  # seconds, of podMonitor.interval
LONGEST_WAIT = {"critical": 180, "warning": 900}  # seconds, by an alert's severity


def rules_hold(root: Path) -> str:
    tests = (root / RULES).with_name("kvasir.test.yaml")
    run_tool("Prometheus", "promtool", "check", "rules", root / RULES)
    run_tool("Prometheus", "promtool", "test", "rules", tests)
    cases = [case for test in load(tests)["tests"] for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules_of(root) if "alert" in rule}
    for fires in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires}
        if alerts != tested:
            what = "fires them" if fires else "does not fire them"
            raise FailedError(f"alerts without a test that {what}: {sorted(alerts ^ tested)}")
    return f"{len(alerts)} alerts, each tested"


def alerts_come_in_time(root: Path) -> str:
    """Check that each alert fires while its harm can be bounded, and says what to do."""
    runbooks = (root / "docs/operations.md").read_text(encoding="utf-8").lower()
    fail_on_first(misfits(load(root / RULES), SHAPES["rules"], RULES))
    for rule in rules_of(root):
        name, severity = rule.get("alert", ""), rule.get("labels", {}).get("severity")
        windows = [seconds(one) for one in re.findall(r"\[(\w+)[\]:]", rule["expr"])]
        if windows and min(windows) < 2 * LONGEST_SCRAPE:
            raise FailedError(f"{name or rule['record']}: a window of {min(windows)} s")
        if name and seconds(rule.get("for", "0s")) > LONGEST_WAIT[severity]:
            raise FailedError(f"{name} waits for {rule['for']}, and is {severity}")
        if name and f"### {name.lower()}\n" not in runbooks:
            raise FailedError(f"docs/operations.md has no section for {name}")
        if name and rule["annotations"]["runbook"] != f"docs/operations.md#{name.lower()}":
            raise FailedError(f"{name} names {rule['annotations']['runbook']}")
    return f"windows, waits and runbooks of {len(rules_of(root))} rules"


def rules_of(root: Path) -> list[dict[str, Any]]:
    return [rule for group in load(root / RULES)["groups"] for rule in group["rules"]]


def rules_follow_the_values(root: Path) -> str:
    """Check that the chart's rules are those of the file, and that each value has an effect."""
    plain = load(root / RULES)
    alerts = [rule["alert"] for rule in rules_of(root) if "alert" in rule]
    objects = rendered(root, {"prometheusRule": {"enabled": True}})
    if one(objects, "PrometheusRule")["spec"] != plain:
        raise FailedError("with the default values, the chart's rules are not those of the file")
    pages = {path.name: path.read_text() for path in (root / "helm/dashboards").glob("*.json")}
    if one(rendered(root, {"dashboards": {"enabled": True}}), "ConfigMap")["data"] != pages:
        raise FailedError(f"the chart's ConfigMap does not have the dashboards {sorted(pages)}")
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
    for path in (root / "helm/dashboards").glob("*.json"):
        sources = [str(one) for key, one in walk(json.loads(path.read_bytes())) if key == "uid"]
        if unknown := set(sources) - {"${datasource}"} - {json.loads(path.read_bytes())["uid"]}:
            raise FailedError(f"{path.name} asks the data sources {sorted(unknown)}")
    queries = [expr for _, expr in expressions(root)]
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(queries)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}, file)
        file.flush()
        run_tool("Prometheus", "promtool", "check", "rules", file.name)
    return f"{len(rules)} queries"


class Shown:
    """The metrics of one path of a server, in Prometheus' text format."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            text = answer.read().decode()
        self.names = set(re.findall(r"^(?:# TYPE )?([a-z0-9_]+)", text, re.MULTILINE))
        # A histogram with labels may have no samples yet.
        histograms = re.findall(r"^# TYPE (\S+) histogram", text, re.MULTILINE)
        self.names |= {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
        self.labels: dict[str, set[str]] = {}  # of names that have samples
        for name, labels in re.findall(r"^([a-z0-9_]+)(?:\{(.*)\})? ", text, re.MULTILINE):
            self.labels.setdefault(name, set()).update(LABEL.findall(labels))


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and text of every file that may name metrics."""
    for pattern in TEXTS:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def unknown_names(named: Iterable[tuple[str, str]], known: set[str]) -> set[str]:
    """Return `PLACE: NAME` of each unknown metric."""
    found = ((place, name) for place, text in named for name in METRIC.findall(text))
    return {f"{place}: {name}" for place, name in found if name not in known | ELSEWHERE}


def unknown_labels(
    expressions: Iterable[tuple[str, str]], shown: Shown, recorded: set[str]
) -> set[str]:
    """Return `PLACE: LABEL` of each label that its metric, or every metric, lacks."""
    every = OF_THE_TARGET.union(*shown.labels.values())
    wrong = set()
    for place, text in expressions:
        for name, selectors in SELECTOR.findall(text):
            has = shown.labels.get(name, every) if name not in recorded else every
            unknown = set(LABEL.findall(selectors)) - has - OF_THE_TARGET
            wrong |= {f"{place}: {name}{{{label}}}" for label in unknown}
        for name, label in VARIABLE.findall(text):
            if label not in shown.labels.get(name, every) | OF_THE_TARGET:
                wrong.add(f"{place}: {name}, {label}")
        for labels in GROUPING.findall(text):
            wrong |= {f"{place}: {label}" for label in set(re.findall(r"\w+", labels)) - every}
    return wrong


def metrics_exist(root: Path) -> str:
    """Check that a running server has every metric and label that is written anywhere."""
    url = server_url()
    shown = Shown(f"{url}/metrics")
    rules = rules_of(root)
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
