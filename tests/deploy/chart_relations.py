"""Relations between the chart's objects, and with the server, its image and the values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from tests.deploy.chart import Chart, Object, one, quantity, variables
from tests.deploy.server_container import EXIT_SECONDS, PATHS
from tests.deploy.shapes import SHAPES, misfits, walk

NAMESPACE = "default"  # into which the chart is rendered
# The least and the most seconds before a probe gives up. KvasirEngineStalled comes before liveness.
WAITS = {"startupProbe": (60, 3600), "readinessProbe": (2, 10), "livenessProbe": (90, 120)}
INTERNAL = ("/health", "/metrics", "/debug")
SETTINGS = (
    "host", "port", "drain_timeout", "cache_dir", "model", "served_model_name", "api_key_file",
    "allowed_hosts", "batch_dir", "salt_file", "state_url_file",
)  # fmt: skip
KEY_FILES = {"KVASIR_API_KEY_FILE", "KEY_FILE", "KVASIR_SALT_FILE", "KVASIR_STATE_URL_FILE"}
WRITTEN = {"HOME", "MODEL_DIR", "KVASIR_CACHE_DIR", "KVASIR_BATCH_DIR"}
# Fields that name an object, themselves or by their `name`.
REFERENCES = {
    "secretName": "Secret", "claimName": "PersistentVolumeClaim", "imagePullSecrets": "Secret",
    "serviceAccountName": "ServiceAccount", "configMap": "ConfigMap", "service": "Service",
    "scaleTargetRef": "Deployment", "backendRefs": "Service", "parentRefs": "Gateway",
    "authenticationRef": "TriggerAuthentication", "endpointPickerRef": "Service",
}  # fmt: skip


def chart_faults(chart: Chart) -> Iterator[str]:
    """Yield every fault of a rendered chart."""
    for document in chart.objects:
        kind = f"{document['apiVersion']}/{document['kind']}"
        yield from misfits(document, SHAPES["objects"].get(kind, {}), kind)
    yield from chart.server.faults()
    for find in (
        unknown_objects, wrong_selectors, wrong_paths, wrong_hosts, wrong_policies,
        wrong_privileges, wrong_mounts, wrong_resources, wrong_replicas, wrong_times,
    ):  # fmt: skip
        yield from find(chart)


def texts(value: Any) -> set[str]:
    return {str(one) for _, one in walk(value)}


def is_below(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a prefix of whole path segments matches a path."""
    return f"{path}/".startswith(tuple(f"{prefix.rstrip('/')}/" for prefix in prefixes))


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def unknown_objects(chart: Chart) -> Iterator[str]:
    """Yield names of objects that neither the chart nor the values have, and unused objects."""
    named = set()
    for document in chart.objects:
        for key, value in walk(document.get("spec", {})):
            if key in REFERENCES and (key != "service" or "name" in value):
                name = value["name"] if isinstance(value, dict) else value
                kind = value.get("kind", "Service") if key == "backendRefs" else REFERENCES[key]
                named.add((kind, name))
                if name not in chart.names(kind) | texts(chart.values):
                    yield f"{document['kind']}: {key} names {name}, which is no {kind}"
    pools = ["InferencePool"] * bool(chart.of("HTTPRoute"))
    for kind in ("Secret", "PersistentVolumeClaim", "ServiceAccount", *pools):
        if unused := {(kind, name) for name in chart.names(kind)} - named:
            yield f"nothing uses {unused}"


def wrong_selectors(chart: Chart) -> Iterator[str]:
    """Yield what selects other pods than the server's, and wrong addresses of the Service."""
    template, test = chart.deployment["spec"]["template"], one(chart.objects, "Pod")
    service, name = one(chart.objects, "Service"), chart.deployment["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    for document in chart.objects:
        spec = document.get("spec", {})
        selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
        if document["kind"] == "Deployment":
            spread = template["spec"]["topologySpreadConstraints"]
            selectors += [constraint["labelSelector"] for constraint in spread]
        for selector in selectors:
            labels = selector.get("matchLabels", selector).items()
            others = test["metadata"]["labels"].items()
            if not labels <= template["metadata"]["labels"].items() or labels <= others:
                yield f"{document['kind']} selects {dict(labels)}"
        for key, value in walk(spec):
            if key == "backendRefs" and value.get("port", port) != port:
                yield f"{document['kind']} names the port {value['port']} of {port}"
            pods = [f"{one}-5d8f9c7b6d-x7k2p" for one in (name, f"{name}-b", f"a-{name}")]
            if key == "query" and [(NAMESPACE, pods[:1])] * value.count("kvasir_num_") != [
                (space, [pod for pod in pods if re.fullmatch(pattern, pod)])
                for space, pattern in re.findall(r'namespace="(\w*)", pod=~"([^"]*)"', value)
            ]:
                yield f"ScaledObject does not select the pods of {name} alone: {value}"
    (container,) = test["spec"]["containers"]
    if variables(container).get("URL") != f"http://{service['metadata']['name']}:{port}":
        yield f"the test asks {variables(container)}; the Service is {service['metadata']['name']}"


def wrong_paths(chart: Chart) -> Iterator[str]:
    """Yield what is published beside the API, and what of the API is not."""
    hidden = INTERNAL if chart.values["publishExplain"] else (*INTERNAL, "/explain")
    wanted = {path for path in PATHS if not is_below(path, hidden)}
    for document in chart.of("HTTPRoute", "Ingress"):
        found = [value for _, value in walk(document) if isinstance(value, dict)]
        pairs = [(one["type"], one["value"]) for one in found if {"type", "value"} <= one.keys()]
        pairs += [(one["pathType"], one["path"]) for one in found if "pathType" in one]
        published = {path for kind, path in pairs if kind == "Exact"}
        for prefix in [path for kind, path in pairs if kind != "Exact"]:
            published |= {path for path in PATHS if is_below(path, [prefix])} or {prefix}
        if published != wanted:
            more, less = sorted(published - wanted), sorted(wanted - published)
            yield f"{document['kind']} publishes {more}, and does not publish {less}"


def wrong_hosts(chart: Chart) -> Iterator[str]:
    """Yield host names under which the server is published or answers, and which nobody gave."""
    hosts = set(chart.values["settings"].get("allowed_hosts", ()))
    for document in chart.of("Ingress", "HTTPRoute"):
        section = chart.values["ingress" if document["kind"] == "Ingress" else "httpRoute"]
        given = section.get("hosts", section.get("hostnames"))
        hosts |= set(given or ["*"])
        found = [text for key, text in walk(document) if key in ("host", "hostnames")]
        if found != given:
            yield f"{document['kind']} publishes {found}; the values have {given}"
    (own,) = chart.names("Service")
    parts = ("", f".{NAMESPACE}", f".{NAMESPACE}.svc", f".{NAMESPACE}.svc.cluster.local")
    wanted = {own + part for part in parts} | hosts
    answered = variables(chart.container).get("KVASIR_ALLOWED_HOSTS", "")
    has_keys = chart.values["apiKey"]["value"] or chart.values["apiKey"]["secretName"]
    if {*answered.split(",")} != ({""} if has_keys else wanted):
        yield f"the server answers as {answered}, and is called {sorted(wanted)}"


def wrong_policies(chart: Chart) -> Iterator[str]:
    """Yield what the network allows and the values do not ask for, and the reverse."""
    given = chart.values["networkPolicy"]
    ours = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}
    labels = one(chart.objects, "Pod")["metadata"]["labels"]
    test = {"podSelector": {"matchLabels": {key: labels[key] for key in labels.keys() & ours}}}
    dns = {"ports": [{"port": 53, "protocol": name} for name in ("UDP", "TCP")]}
    rule: Object = {"ports": [{"port": "http", "protocol": "TCP"}]}
    wanted = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [rule | ({"from": [test, *given["from"]]} if given["from"] else {})],
        "egress": [dns, *given["egress"]] if given["egress"] else [],
    }
    policies = chart.of("NetworkPolicy")
    found = [{key: policy["spec"][key] for key in wanted} for policy in policies]
    if found != [wanted] * given["enabled"]:
        yield f"NetworkPolicy has {found} instead of {wanted}"


def wrong_privileges(chart: Chart) -> Iterator[str]:
    """Yield users, writable roots, folders and variables that the values do not ask for."""
    values = chart.values
    asked = {f"KVASIR_{name.upper()}" for name in (*SETTINGS, *values["settings"])} | WRITTEN
    asked |= {"URL", "KEY_FILE", *texts({"": [*values["env"], values["model"]]})}
    for spec in chart.pods:
        for container in containers(spec):
            if not (container["securityContext"]["readOnlyRootFilesystem"] or values["gpus"]):
                yield f"{container['name']} may write to its root"
            if unasked := variables(container).keys() - asked:
                yield f"{container['name']} has the variables {sorted(unasked)}"
        folders = [volume["hostPath"] for volume in spec.get("volumes", ()) if "hostPath" in volume]
        if folders and values["model"]["source"] != "hostPath":
            yield f"a pod mounts {folders} of its node"


def wrong_mounts(chart: Chart) -> Iterator[str]:
    """Yield mounts without a volume and the reverse, writable ones, and keys that are nowhere."""
    secrets = {one["metadata"]["name"]: one["stringData"] for one in chart.of("Secret")}
    read = set()
    for spec in chart.pods:
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        mounted = set()
        for container in containers(spec):
            given = variables(container)
            written = {"/tmp"} | {given[name] for name in WRITTEN & given.keys()}  # noqa: S108
            mounts = {one["mountPath"]: one for one in container.get("volumeMounts") or ()}
            mounted |= {mount["name"] for mount in mounts.values()}
            for path, mount in mounts.items():
                is_written = any(PurePosixPath(one).is_relative_to(path) for one in written)
                if not (is_written or mount.get("readOnly")):
                    yield f"{container['name']} may write to {path}, and writes to {written}"
            for name in KEY_FILES & given.keys():
                path = PurePosixPath(given[name])
                volume = volumes.get(mounts.get(str(path.parent), {}).get("name"), {})
                secret = volume.get("secret", {}).get("secretName")
                read.add((secret, path.name))
                entries = {"salt", "url"}  # of existing secrets
                if secret == chart.values["apiKey"]["secretName"]:
                    entries = {chart.values["apiKey"]["secretKey"]}
                known = secrets.get(secret, entries)
                if not secret or path.name not in known:
                    yield f"{name} of {container['name']} is {path}, which no Secret has"
        if mounted != volumes.keys():
            yield f"a pod mounts {sorted(mounted)} of its volumes {sorted(volumes)}"
    if unread := {(name, key) for name, keys in secrets.items() for key in keys} - read:
        yield f"no pod reads the keys {sorted(unread)}"


def wrong_resources(chart: Chart) -> Iterator[str]:
    """Yield requests above limits, missing ones, and what does not fit its limit."""
    for spec in chart.pods:
        for container in containers(spec):
            limits = container["resources"]["limits"]
            requests = limits | container["resources"].get("requests", {})
            for name, asked in requests.items():
                if name in limits and quantity(asked) > quantity(limits[name]):
                    yield f"{container['name']} requests {asked} of {name}; limit {limits[name]}"
            if missing := {"cpu", "memory", "ephemeral-storage"} - requests.keys():
                yield f"{container['name']} requests no {sorted(missing)}"
        bounds = [one["resources"]["limits"]["ephemeral-storage"] for one in spec["containers"]]
        sizes = [size for key, size in walk(spec) if key == "sizeLimit"]
        if sum(map(quantity, sizes)) > sum(map(quantity, bounds)):
            yield f"volumes of {sizes} take more than {bounds}"
    memory = quantity(chart.container["resources"]["limits"]["memory"])
    settings = chart.server.settings
    if 1.1 * (settings.kv_cache_memory or 0) + 300 * 2**20 > memory:
        yield f"the KV cache of {settings.kv_cache_memory} bytes does not fit {memory}"
    for claim in chart.of("PersistentVolumeClaim"):
        if quantity(claim["spec"]["resources"]["requests"]["storage"]) <= settings.batch_dir_bytes:
            yield f"a claim of {claim['spec']} for batches of {settings.batch_dir_bytes} bytes"


def wrong_replicas(chart: Chart) -> Iterator[str]:
    """Yield claims to which two pods may write, numbers that two scale, and blocked drains."""
    spec = chart.deployment["spec"]
    is_alone = spec.get("replicas") == 1 and spec["strategy"].get("type") == "Recreate"
    modes = [claim["spec"]["accessModes"] for claim in chart.of("PersistentVolumeClaim")]
    is_shared = "KVASIR_STATE_URL_FILE" in str(chart.container["env"])
    is_shared &= modes == [["ReadWriteMany"]]
    for key, claim in walk(chart.pods[0]):
        if key == "persistentVolumeClaim" and not (claim.get("readOnly") or is_alone or is_shared):
            yield f"two pods may write to {claim['claimName']}: {spec['strategy']}"
    n_scalers, is_fixed = (
        len(chart.of("HorizontalPodAutoscaler", "ScaledObject")),
        "replicas" in spec,
    )
    if n_scalers + is_fixed != 1 or n_scalers != chart.values["autoscaling"]["enabled"]:
        yield f"{n_scalers} scalers; {spec.get('replicas')} replicas"
    for budget in chart.of("PodDisruptionBudget"):
        if str(budget["spec"]["maxUnavailable"]).strip("0%") == "":
            yield f"{budget['spec']} blocks drains"


def wrong_times(chart: Chart) -> Iterator[str]:
    """Yield waits that are too short, or too long, for what they wait for."""
    start = chart.values["startupSeconds"]
    deadline = chart.deployment["spec"]["progressDeadlineSeconds"]
    if not 60 <= start <= deadline - 300:
        yield f"a model has {start} s to load, and an update {deadline} s"
    for name, (least, most) in (WAITS | {"startupProbe": (start, start)}).items():
        probe = {"periodSeconds": 0, "failureThreshold": 0} | chart.container.get(name, {})
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        is_quick = probe.get("timeoutSeconds", 1) <= 5 and probe["periodSeconds"] <= 10
        if not (least <= seconds <= most and is_quick):
            yield f"{name} gives up after {seconds} s, not {least} to {most}: {probe}"
    if chart.pause_seconds < 5:
        yield f"a stopping pod refuses requests that are still sent after {chart.pause_seconds} s"
    hung = chart.container.get("livenessProbe", {}).get("terminationGracePeriodSeconds", 0)
    if not chart.pause_seconds + EXIT_SECONDS <= hung <= 60:
        yield f"a server that has failed is killed after {hung} s"
    for ingress in chart.of("Ingress"):
        notes = ingress["metadata"].get("annotations", {})
        seconds = int(notes.get("nginx.ingress.kubernetes.io/proxy-read-timeout", 60))
        body = notes.get("nginx.ingress.kubernetes.io/proxy-body-size", "1m").upper()
        if seconds < 600 or quantity(body) < 200e6:
            yield f"ingress-nginx ends answers after {seconds} s, and bodies at {body}"
