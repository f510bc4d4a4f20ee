"""What `make validate` finds wrong between objects of the chart, which render well as they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest

from tests.deploy.helm_objects import Object, quantity, wrong_selectors

SERVER, TEST = {"app": "kvasir", "part": "server"}, {"app": "kvasir", "part": "test"}
SPREAD = [{"labelSelector": {"matchLabels": SERVER}}]
POD = {"metadata": {"labels": SERVER}, "spec": {"topologySpreadConstraints": SPREAD}}
OBJECTS: dict[str, Object] = {
    "Deployment": {
        "metadata": {"name": "k"},
        "spec": {"selector": {"matchLabels": SERVER}, "template": POD},
    },
    "Pod": {"metadata": {"labels": TEST}, "spec": {}},
    "Service": {"spec": {"selector": SERVER}},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": SERVER}}},
    "ScaledObject": {"spec": {"scaleTargetRef": {"name": "k"}}},
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("1k", 1e3),
        ("3T", 3e12),
        ("2P", 2e15),
        ("1E", 1e18),
        ("1Ki", 1024),
        ("1.5Pi", 1.5 * 2**50),
    ],
)
def test_quantities_are_kubernetes(text: str, wanted: float) -> None:
    assert quantity(text) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Service", lambda spec: spec["selector"].update(part="test")),
        ("NetworkPolicy", lambda spec: spec["podSelector"].update(matchLabels={})),
        (
            "Deployment",
            lambda spec: spec["template"]["spec"]["topologySpreadConstraints"][0].update(
                labelSelector={"a": "b"}
            ),
        ),
        ("ScaledObject", lambda spec: spec["scaleTargetRef"].update(name="another")),
    ],
)
def test_whoever_selects_something_else_is_named(
    kind: str, change: Callable[[Object], None]
) -> None:
    objects = [deepcopy(value) | {"kind": name} for name, value in OBJECTS.items()]
    assert list(wrong_selectors(objects)) == []
    change(next(one["spec"] for one in objects if one["kind"] == kind))
    (wrong,) = wrong_selectors(objects)
    assert wrong.startswith(kind)
