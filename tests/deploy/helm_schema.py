"""Write the parts of helm/values.schema.json that follow from the server and from the alerts.

python -m tests.deploy.helm_schema

The bounds of a size apply to a number of bytes. Of a size such as 2GiB the schema checks only the
form.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from kvasir.server.settings import Settings
from kvasir.server.telemetry.metrics import Metrics
from tests.deploy.checking import load

CHART = Path(__file__).resolve().parents[2] / "helm"
SCHEMA = CHART / "values.schema.json"
OF_THE_CHART = {
    "host", "port", "model", "served_model_name", "api_key", "api_key_file", "drain_timeout",
    "adapter_admin_key", "models_admin_key", "salt", "salt_file", "state_url", "state_url_file",
}  # fmt: skip
SIZE = r"^[0-9]*\.?[0-9]+ ?([kKmMgGtTpP]([iI]?[bB])?|[bB])?$"
BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum"}


def settings_schema() -> dict[str, Any]:
    """Return the schema of each setting by name."""
    known = Settings.model_json_schema()["properties"]
    return {name: _value_schema(known[name]) for name in known if name not in OF_THE_CHART}


def _value_schema(of: dict[str, Any]) -> dict[str, Any]:
    """Remove null, which means "not given" to Helm, and move bounds of sizes into their branch."""
    described = {"description": of["description"]} if "description" in of else {}
    branches = [branch for branch in of.get("anyOf", ()) if branch != {"type": "null"}]
    if len(branches) == 1:
        return described | _value_schema(branches[0])
    if branches:
        bounds = {word: of[key] for key, word in BOUNDS.items() if key in of}
        sizes = [{"type": "string", "pattern": SIZE}, {"type": "integer"} | bounds]
        return described | {"anyOf": sizes}
    left_out = {"default", "title", "description"}
    return described | {key: value for key, value in of.items() if key not in left_out}


def open_parts(schema: dict[str, Any], values: Any, place: str = "values") -> Iterator[str]:
    """Yield where a schema accepts anything, or unknown keys, or lacks a default value's key."""
    if not {"type", "enum", "anyOf"} & schema.keys():
        yield f"the schema accepts anything as {place}"
    properties = schema.get("properties", {})
    if properties and schema.get("additionalProperties") is not False:
        yield f"the schema accepts unknown keys of {place}"
    if properties and (missing := (values or {}).keys() - properties.keys()):
        yield f"the schema lacks {sorted(missing)} of {place}"
    for name, part in properties.items():
        yield from open_parts(part, (values or {}).get(name), f"{place}.{name}")


def generated(schema: dict[str, Any], chart: Path = CHART) -> dict[str, Any]:
    """Return the schema with its generated parts as they should be."""
    schema = deepcopy(schema)
    schema["properties"]["settings"]["properties"] = settings_schema()
    rules = schema["properties"]["prometheusRule"]["properties"]
    (group,) = load(chart / "alerts/kvasir.rules.yaml")["groups"]
    severities = {rule["alert"]: {"type": "string"} for rule in group["rules"] if "alert" in rule}
    rules["severities"] = {
        "type": "object", "additionalProperties": False, "properties": severities,
    }  # fmt: skip
    page = Metrics(lambda: (0, 0, 0.0)).server.render("")[0].decode()
    buckets = re.findall(r'kvasir_time_to_first_token_seconds_bucket\{le="([0-9.]+)",', page)
    rules["thresholds"]["properties"]["firstTokenSeconds"] = {"enum": buckets}
    return schema


def main() -> int:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    SCHEMA.write_text(json.dumps(generated(schema), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
