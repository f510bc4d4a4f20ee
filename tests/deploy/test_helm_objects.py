"""Wrong relations between the chart's objects are found, and right ones are accepted."""

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


def spread(spec: Object) -> Object:
    constraint: Object = spec["template"]["spec"]["topologySpreadConstraints"][0]
    return constraint


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("500m", 0.5), ("2", 2), ("1k", 1e3), ("1E", 1e18), ("1Ki", 1024), ("1.5Pi", 1.5 * 2**50)],
)
def test_quantities_are_parsed_as_by_kubernetes(text: str, wanted: float) -> None:
    assert quantity(text) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Service", lambda spec: spec["selector"].update(part="test")),
        ("NetworkPolicy", lambda spec: spec["podSelector"].update(matchLabels={})),
        ("Deployment", lambda spec: spread(spec).update(labelSelector={"a": "b"})),
        ("ScaledObject", lambda spec: spec["scaleTargetRef"].update(name="another")),
    ],
)
def test_an_object_with_a_wrong_selector_is_named(
    kind: str, change: Callable[[Object], None]
) -> None:
    objects = [deepcopy(value) | {"kind": name} for name, value in OBJECTS.items()]
    assert list(wrong_selectors(objects)) == []
    change(next(one["spec"] for one in objects if one["kind"] == kind))
    (wrong,) = wrong_selectors(objects)
    assert wrong.startswith(kind)
