"""The chart's objects: relations that Kubernetes' schemas do not check, and custom kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tests.deploy.server_container import PATHS, ServerContainer

SCHEMAS = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))

FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3}
FACTORS |= {prefix: 1e3**i for i, prefix in enumerate("MGTPE", 2)}
FACTORS |= {f"{prefix}i": 2.0 ** (10 * i) for i, prefix in enumerate("KMGTPE", 1)}
Object = dict[str, Any]
NAMESPACE = "default"  # into which the chart is rendered
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
INTERNAL = ("/health", "/metrics", "/debug")
KEY_FILES = {"KVASIR_API_KEY_FILE", "KEY_FILE"}


def faults(objects: list[Object], image: Object) -> Iterator[str]:
    """Yield every fault; `image` is the environment of the server's image."""
    for find in (
        wrong_custom_kinds, excessive_requests, wrong_selectors, unknown_ports, unknown_backends,
        unknown_paths, unknown_volumes, shared_claims, blocked_drains, wrong_queries, wrong_test,
    ):  # fmt: skip
        yield from find(objects)
    yield from server(objects, image).faults()


def one(objects: list[Object], kind: str) -> Object:
    """Return the first object of a kind."""
    return next(document for document in objects if document["kind"] == kind)


def excessive_requests(objects: list[Object]) -> Iterator[str]:
    """Yield containers whose requests exceed their limits, which clusters refuse."""
    for template in (one(objects, "Deployment")["spec"]["template"], one(objects, "Pod")):
        spec = template["spec"]
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            resources = container.get("resources", {})
            limits = resources.get("limits", {})
            for name, asked in resources.get("requests", {}).items():
                if name in limits and quantity(asked) > quantity(limits[name]):
                    yield f"{container['name']} requests {asked} of {name}; limit {limits[name]}"


def quantity(text: str | float) -> float:
    """Parse a quantity of Kubernetes."""
    number = str(text).rstrip("".join(set("".join(FACTORS))))
    return float(number) * FACTORS[str(text)[len(number) :]]


def wrong_selectors(objects: list[Object]) -> Iterator[str]:
    """Yield objects that miss the server's pods or select the test's, and wrong scalers."""
    deployment = one(objects, "Deployment")
    server = deployment["spec"]["template"]["metadata"]["labels"]
    test = one(objects, "Pod")["metadata"]["labels"]
    for document in objects:
        spec = document.get("spec", {})
        spread = spec.get("template", {}).get("spec", {}).get("topologySpreadConstraints", ())
        selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
        for selector in selectors + [constraint["labelSelector"] for constraint in spread]:
            labels = selector.get("matchLabels", selector)
            if not labels.items() <= server.items() or labels.items() <= test.items():
                yield f"{document['kind']} selects {labels}"
        target = spec.get("scaleTargetRef", {}).get("name")
        if target not in (None, deployment["metadata"]["name"]):
            yield f"{document['kind']} scales {target}"


def wrong_custom_kinds(objects: list[Object]) -> Iterator[str]:
    """Yield fields of custom kinds that their references do not have, or with wrong values."""
    for document in objects:
        name = f"{document['apiVersion']}/{document['kind']}"
        if name in SCHEMAS["kinds"]:
            yield from schema_faults(document, SCHEMAS["kinds"][name], name)


def unrestricted_pods(objects: list[Object]) -> Iterator[str]:
    """Yield what the Pod Security Standard "restricted" refuses."""
    for spec in (pod(objects), one(objects, "Pod")["spec"]):
        yield from schema_faults(spec, SCHEMAS["restricted"], "a pod")


def schema_faults(value: Object, schema: Object, name: str) -> Iterator[str]:
    """Yield what a schema refuses in a value."""
    import jsonschema  # noqa: PLC0415  (what imports this file may lack it)

    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        yield f"{name}: {error.json_path}: {error.message}"


def pod(objects: list[Object]) -> Object:
    """Return the specification of the server's pods."""
    spec: Object = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def container_ports(containers: list[Object]) -> dict[str, int]:
    """Return the ports of containers by name."""
    ports = [port for container in containers for port in container.get("ports", ())]
    return {port["name"]: port["containerPort"] for port in ports}


def unknown_ports(objects: list[Object]) -> Iterator[str]:
    """Yield ports that the server's pods do not have."""
    spec = pod(objects)
    ports = container_ports(spec["containers"])
    asked = [
        (name, probe["httpGet"]["port"])
        for container in spec["containers"]
        for name, probe in container.items()
        if name in PROBES
    ]
    for document in objects:
        kind, given = document["kind"], document.get("spec", {})
        if kind == "Service":
            asked += [(kind, port["targetPort"]) for port in given["ports"]]
        elif kind == "PodMonitor":
            asked += [(kind, endpoint["port"]) for endpoint in given["podMetricsEndpoints"]]
        elif kind == "NetworkPolicy":
            asked += [(kind, port["port"]) for rule in given["ingress"] for port in rule["ports"]]
        elif kind == "InferencePool":
            asked += [(kind, port["number"]) for port in given["targetPorts"]]
    for name, port in asked:
        if port not in {*ports, *ports.values()}:
            yield f"{name} names the port {port}; the pod has {ports}"


def unknown_backends(objects: list[Object]) -> Iterator[str]:
    """Yield backends of routes that are neither the Service nor the chart's InferencePool."""
    service = one(objects, "Service")
    ports = [port[key] for port in service["spec"]["ports"] for key in ("name", "port")]
    backends = [(service["metadata"]["name"], port) for port in ports]
    pools = {other["metadata"]["name"] for other in objects if other["kind"] == "InferencePool"}
    for document in objects:
        rules = document.get("spec", {}).get("rules", ())
        if document["kind"] == "Ingress":
            paths = [path for rule in rules for path in rule["http"]["paths"]]
            targets = [path["backend"]["service"] for path in paths]
            named = [(target["name"], *target["port"].values()) for target in targets]
        elif document["kind"] == "HTTPRoute":
            targets = [target for rule in rules for target in rule["backendRefs"]]
            named = [(one["name"], one["port"]) for one in targets if "kind" not in one]
            others = {target["name"] for target in targets if "kind" in target}
            if pools and others != pools:  # without a pool here, it names that of another chart
                yield f"HTTPRoute names {others}, and the pool is {pools}"
        else:
            continue
        for backend in named:
            if backend not in backends:
                yield f"{document['kind']} names {backend}; the Service is {backends}"


def unknown_paths(objects: list[Object]) -> Iterator[str]:
    """Yield paths that the server does not have, and published ones that are internal."""
    for document in objects:
        kind, spec = document["kind"], document.get("spec", {})
        exact, prefixes = [], []
        if kind == "PodMonitor":
            exact = [endpoint["path"] for endpoint in spec["podMetricsEndpoints"]]
        elif kind == "HTTPRoute":
            matches = [match["path"] for rule in spec["rules"] for match in rule["matches"]]
            exact = [path["value"] for path in matches if path["type"] == "Exact"]
            prefixes = [path["value"] for path in matches if path["type"] == "PathPrefix"]
        elif kind == "Ingress":
            paths = [path for rule in spec["rules"] for path in rule["http"]["paths"]]
            exact = [path["path"] for path in paths if path["pathType"] == "Exact"]
            prefixes = [path["path"] for path in paths if path["pathType"] == "Prefix"]
        below = {prefix: {path for path in PATHS if is_below(path, prefix)} for prefix in prefixes}
        if unknown := [*(set(exact) - PATHS), *(prefix for prefix in below if not below[prefix])]:
            yield f"{kind} names paths that the server does not have: {unknown}"
        published = set(exact).union(*below.values())
        internal = {path for path in published for name in INTERNAL if is_below(path, name)}
        if internal and kind != "PodMonitor":
            yield f"{kind} publishes internal paths: {sorted(internal)}"


def is_below(path: str, prefix: str) -> bool:
    """Return whether a prefix of whole path segments matches a path."""
    return f"{path}/".startswith(f"{prefix.rstrip('/')}/")


def unknown_volumes(objects: list[Object]) -> Iterator[str]:
    """Yield mounts of volumes that a pod lacks, and files of keys that are in no Secret."""
    secrets = {
        document["metadata"]["name"]: document["stringData"]
        for document in objects
        if document["kind"] == "Secret"
    }
    for spec in (pod(objects), one(objects, "Pod")["spec"]):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts") or ()}
            for name in set(mounts.values()) - volumes.keys():
                yield f"{container['name']} mounts {name}, which is no volume"
            environment = variables(container)
            if "HOME" in environment and environment["HOME"] not in mounts:
                yield f"{container['name']} has no volume for its home, {environment['HOME']}"
            for name in KEY_FILES & environment.keys():
                path = PurePosixPath(environment[name])
                volume = volumes.get(mounts.get(str(path.parent), ""), {})
                secret = volume.get("secret", {}).get("secretName")
                if not secret or (secrets and path.name not in secrets.get(secret, {})):
                    yield f"{name} of {container['name']} is {path}, which no Secret has"


def shared_claims(objects: list[Object]) -> Iterator[str]:
    """Yield claims to which two pods may write, or that are not the one that the chart makes."""
    deployment = one(objects, "Deployment")["spec"]
    own = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    for volume in pod(objects).get("volumes", ()):
        claim = volume.get("persistentVolumeClaim", {"readOnly": True})
        if claim.get("readOnly"):
            continue
        if deployment.get("replicas") != 1 or deployment["strategy"].get("type") != "Recreate":
            yield f"two pods may write to {claim['claimName']}: {deployment['strategy']}"
        if own and claim["claimName"] not in own:
            yield f"{claim['claimName']} is not the chart's claim, {own}"


def blocked_drains(objects: list[Object]) -> Iterator[str]:
    """Yield budgets that never let a node be drained, and pods that stop without a pause."""
    for document in objects:
        spec = document.get("spec", {})
        if document["kind"] == "PodDisruptionBudget" and (
            str(spec.get("maxUnavailable", 0)).strip("0%") == ""
            or spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow"
        ):
            yield f"{document['kind']} blocks drains: {spec}"
    if not pause_seconds(objects):
        yield "a stopping pod does not pause, so it refuses requests that are still sent to it"


def pause_seconds(objects: list[Object]) -> float:
    """Return the time between a pod's removal from the endpoints and its signal to stop."""
    lifecycle = pod(objects)["containers"][0].get("lifecycle", {})
    return float(lifecycle.get("preStop", {}).get("sleep", {}).get("seconds", 0))


def wrong_queries(objects: list[Object]) -> Iterator[str]:
    """Yield queries of KEDA that miss the Deployment's pods, or count those of another."""
    name = one(objects, "Deployment")["metadata"]["name"]
    for document in objects:
        if document["kind"] != "ScaledObject":
            continue
        for query in [trigger["metadata"]["query"] for trigger in document["spec"]["triggers"]]:
            patterns = re.findall(r'pod=~"([^"]*)"', query)
            fits = [
                bool(re.fullmatch(pattern, f"{name}-5d8f9c7b6d-x7k2p"))
                and not re.fullmatch(pattern, f"{name}-b-5d8f9c7b6d-x7k2p")
                and not re.fullmatch(pattern, f"a-{name}-5d8f9c7b6d-x7k2p")
                for pattern in patterns
            ]
            spaces = re.findall(r'namespace="([^"]*)"', query)
            if not (fits and all(fits) and set(spaces) == {NAMESPACE} and len(spaces) == len(fits)):
                yield f"ScaledObject does not select the pods of {name} alone: {query}"


def wrong_test(objects: list[Object]) -> Iterator[str]:
    """Yield an address of the chart's test that is not the Service's, and unread variables."""
    (container,) = one(objects, "Pod")["spec"]["containers"]
    service = one(objects, "Service")
    address = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    environment = variables(container)
    if environment.get("URL") != address:
        yield f"the test asks {environment.get('URL')}; the Service is {address}"
    for name in environment:
        if json.dumps(name) not in container["args"][0]:
            yield f"the test does not read {name}"


def variables(container: Object) -> dict[str, str]:
    """Return the environment of a container, without values that come from elsewhere."""
    environment = container.get("env", ())
    return {entry["name"]: entry["value"] for entry in environment if "value" in entry}


def server(objects: list[Object], image: Object) -> ServerContainer:
    """Return the server's container."""
    spec = pod(objects)
    container = spec["containers"][0]
    return ServerContainer(
        image | variables(container),
        [
            image["KVASIR_MODEL"],
            *(mount["mountPath"] for mount in container.get("volumeMounts") or ()),
        ],
        set(container_ports([container]).values()),
        {name: container.get(name, {}).get("httpGet", {}).get("path", "") for name in PROBES},
        spec["terminationGracePeriodSeconds"] - pause_seconds(objects),
    )
