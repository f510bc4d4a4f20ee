"""What comes next: the page's sampler against the server's, and bars that follow the sliders."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import PYTHON, ROOT
from tests.browser.playground import setting

N_DRAWS = 1000
# The share of evenly spaced numbers for which the server's sampler draws each token.
SERVER = f"""
import json, sys
import numpy as np
from kvasir.server.engine.sampling.sampler import sample
from kvasir.server.engine.sampling.params import SamplingParams

class Numbers:
    def __init__(self, value): self.value = value
    def random(self): return self.value

class Sequence:
    constraint, output_ids = None, ()

for line in sys.stdin:
    logits, fields = json.loads(line)
    row, counts, sequence = np.array(logits, np.float32), [0] * len(logits), Sequence()
    sequence.params = SamplingParams(max_tokens=1, **fields)
    for i in range({N_DRAWS}):
        sequence.generator = Numbers((i + 0.5) / {N_DRAWS})
        counts[sample(row, sequence)] += 1 / {N_DRAWS}
    print(json.dumps(counts))
"""
PAGE = """async cases => {
  const { drawProbabilities } = await import(
    new URL("static/playground/sampler.js", document.baseURI)
  );
  return cases.map(([logits, fields]) => drawProbabilities(logits, fields));
}"""


def test_the_bars_have_the_server_s_arithmetic(modules: Page) -> None:
    rng = random.Random(0)
    cases: list[tuple[list[float], dict[str, Any]]] = []
    for _ in range(40):
        logits = [rng.gauss(0, rng.choice([0.5, 2, 6])) for _ in range(rng.randint(2, 40))]
        fields = {
            "temperature": rng.choice([0, 0.3, 1, 2.5]),
            "top_k": rng.choice([0, 1, 3, 100]),
            "top_p": rng.choice([1, 0.95, 0.5, 0.05]),
            "min_p": rng.choice([0, 0.02, 0.3, 1]),
        }
        cases.append((logits, fields))
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    run = subprocess.run(
        [PYTHON, "-c", SERVER], input=lines, capture_output=True, text=True, check=True, cwd=ROOT
    )
    expected = [json.loads(line) for line in run.stdout.splitlines()]
    for case, shares, counts in zip(cases, modules.evaluate(PAGE, cases), expected, strict=True):
        for share, count in zip(shares, counts, strict=True):
            assert abs(share - count) <= 1.5 / N_DRAWS, case


def test_the_bars_follow_the_sliders(
    page: Page,
    url: str,
    look: Callable[[Page, str], None],
    axe_findings: Callable[[Page], list[str]],
) -> None:
    card = page.locator("#upcoming")
    card.locator("summary").click()
    rows = card.locator("li")
    expect(rows).to_have_count(10)
    prompt = page.locator("#prompt").input_value()
    found = page.request.post(f"{url}/explain", data={"text": prompt, "top_k": 10}).json()
    names = [token["text"] for token in found["next_tokens"]]
    assert [name.inner_text() for name in rows.locator("code").all()][:3] == names[:3]
    look(page, "playground-upcoming")
    assert axe_findings(page) == []
    setting(page, "top_p").fill("1")
    setting(page, "temperature").fill("2")  # flat enough for the unlikely tokens to count
    found = page.request.post(f"{url}/explain", data={"text": prompt, "top_k": 4096}).json()
    weights = [token["probability"] ** 0.5 for token in found["next_tokens"]]
    expect(rows.first).to_contain_text(f"{100 * weights[0] / sum(weights):.1f}\u00a0%")
    setting(page, "top_k").fill("3")
    expect(card.locator(".dropped")).to_have_count(7)
    setting(page, "temperature").fill("0")
    expect(rows.first).to_contain_text("100")
    expect(card.locator(".dropped")).to_have_count(9)
    page.locator("#prompt").fill("import ")
    page.locator("#prompt").blur()
    expect(rows.first.locator("code")).not_to_have_text(names[0])
    page.get_by_role("button", name="Clear", exact=True).click()
    expect(rows).to_have_count(0)


@pytest.mark.refusals
def test_an_old_failure_leaves_newer_bars(page: Page) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/explain", hold, times=1)
    with page.expect_request("**/explain"):
        page.locator("#upcoming summary").click()
    page.locator("#prompt").fill("import ")
    page.locator("#prompt").blur()
    expect(page.locator("#upcoming li")).to_have_count(10)
    with page.expect_response("**/explain"):
        held[0].fulfill(status=500, body="")
    setting(page, "temperature").fill("0")
    expect(page.locator("#upcoming .dropped")).to_have_count(9)
    expect(page.locator("#upcoming-error")).to_be_hidden()
