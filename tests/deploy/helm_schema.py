"""Write the settings part of helm/values.schema.json from the server's own settings.

python -m tests.deploy.helm_schema

Bounds of sizes hold for numbers of bytes; of a size in words, such as 2GiB, only the form is checked before the start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from server.settings import Settings

SCHEMA = Path(__file__).resolve().parents[2] / "helm/values.schema.json"
OF_THE_CHART = {
    "host",
    "port",
    "model",
    "served_model_name",
    "api_key",
    "api_key_file",
    "drain_timeout",
}
SIZE = r"^[0-9]*\.?[0-9]+ ?([kKmMgGtTpP]([iI]?[bB])?|[bB])?$"
BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum"}


def settings_schema() -> dict[str, Any]:
    """By name of a setting, the schema of its value."""
    known = Settings.model_json_schema()["properties"]
    return {name: _value_schema(known[name]) for name in known if name not in OF_THE_CHART}


def _value_schema(of: dict[str, Any]) -> dict[str, Any]:
    """Without null, which Helm takes for "not given", and with the bounds of sizes where JSON Schema looks for them."""
    described = {"description": of["description"]} if "description" in of else {}
    branches = [branch for branch in of.get("anyOf", ()) if branch != {"type": "null"}]
    if len(branches) == 1:
        return described | _value_schema(branches[0])
    if branches:
        bounds = {word: of[key] for key, word in BOUNDS.items() if key in of}
        return described | {
            "anyOf": [{"type": "string", "pattern": SIZE}, {"type": "integer"} | bounds]
        }
    return described | {
        key: value for key, value in of.items() if key not in {"default", "title", "description"}
    }


def main() -> int:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["settings"]["properties"] = settings_schema()
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
