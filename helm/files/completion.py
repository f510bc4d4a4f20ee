# ruff: noqa: S310, T201
"""Check the server at URL with one streamed answer of its first model. The chart's test runs it."""

import json
import os
import pathlib
import urllib.request

url = os.environ["URL"]
headers = {"content-type": "application/json"}
if file := os.environ.get("KEY_FILE"):
    lines = pathlib.Path(file).read_text(encoding="utf-8-sig").split("\n")
    keys = [line.split()[-1] for line in lines if line.strip() and not line.strip().startswith("#")]
    headers["authorization"] = f"Bearer {keys[0]}"
urllib.request.urlopen(f"{url}/health/ready", timeout=10).close()
body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 4}}).encode()
request = urllib.request.Request(f"{url}/generate_stream", body, headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    events = [line for line in answer.read().decode().splitlines() if line.startswith("data:")]
assert json.loads(events[-1][5:])["details"]["finish_reason"], events[-1:]
print(f"{len(events)} events: the server answers")
