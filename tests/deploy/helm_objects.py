"""Relations between the chart's objects, which Kubernetes' schemas do not check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3}
FACTORS |= {prefix: 1e3**i for i, prefix in enumerate("MGTPE", 2)}
FACTORS |= {f"{prefix}i": 2.0 ** (10 * i) for i, prefix in enumerate("KMGTPE", 1)}
Object = dict[str, Any]


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
