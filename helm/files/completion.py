# ruff: noqa: S310, T201
"""Check the server at URL with one streamed completion. The chart's test runs this file."""

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
body = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True}).encode()
request = urllib.request.Request(f"{url}/v1/completions", body, headers)
with urllib.request.urlopen(request, timeout=60) as answer:
    events = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")]
assert events[-1] == "data: [DONE]", events[-1:]
assert json.loads(events[-2][6:])["choices"][0]["finish_reason"], events[-2]
print(f"{len(events) - 1} events and the end: the server answers")
