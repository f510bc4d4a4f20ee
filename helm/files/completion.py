# ruff: noqa: S310, T201
"""Ask the first model of the server at URL for a stream, a vector or scores: the chart's test."""

import json
import os
import pathlib
import urllib.request
from urllib.parse import quote

url = os.environ["URL"]
headers = {"content-type": "application/json"}
if file := os.environ.get("KEY_FILE"):
    lines = pathlib.Path(file).read_text(encoding="utf-8-sig").split("\n")
    keys = [line.split()[-1] for line in lines if line.strip() and not line.strip().startswith("#")]
    headers["authorization"] = f"Bearer {keys[0]}"
urllib.request.urlopen(f"{url}/health/ready", timeout=10).close()


def ask(path: str, body: object = None) -> str:
    """Return the text that the server answers to a GET, or to a POST of a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


model = json.loads(ask("/v1/models"))["data"][0]["id"]
pooling = json.loads(ask(f"/model?model={quote(model)}"))["config"]["pooling"]
if pooling is None:
    body = {"model": model, "inputs": "Hello", "parameters": {"max_new_tokens": 4}}
    lines = ask("/generate_stream", body).splitlines()
    events = [line for line in lines if line.startswith("data:")]
    assert json.loads(events[-1][5:])["details"]["finish_reason"], events[-1:]
    found = f"{len(events)} events"
else:
    path = "/predict" if pooling["labels"] else "/embed"
    assert json.loads(ask(path, {"model": model, "inputs": "Hello"}))
    found = f"{path} of {model}"
print(f"{found}: the server answers")
