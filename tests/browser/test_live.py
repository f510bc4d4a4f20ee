"""The live view: its parser, its figures, the batch, and when it polls."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.playground import stop_clock

Samples = dict[str, list[tuple[dict[str, str], float]]]

PARSE = """async ([text, names]) => {
  const { Metrics } = await import("./static/live/prometheus.js");
  const metrics = new Metrics(text);
  return names.map((name) =>
    metrics.samples(name).map(({ labels, value }) => [labels, String(value)]));
}"""
QUANTILES = """async ([buckets, qs]) => {
  const { quantile } = await import("./static/live/prometheus.js");
  return qs.map((q) => quantile(q, buckets.map(([bound, count]) => [bound ?? Infinity, count])));
}"""
FIGURES = """async ([moments, model]) => {
  const { Figures } = await import("./static/live/figures.js");
  const figures = new Figures(model);
  for (const [text, at] of moments) figures.add(text, at);
  return [figures.points, figures.rejected];
}"""
# Once it is answered, all earlier requests have been counted.
LATER_REQUEST = "fetch('health/live').then((response) => response.status)"
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
NO_VALUE = "\N{EN DASH}"
FIELDS = (
    *("request_id", "sequence_id", "state", "row", "max_tokens", "prompt_tokens"),
    *("cached_tokens", "computed_tokens", "generated_tokens", "seconds"),
)
SEQUENCES = (
    ("a-name-longer-than-the-table", 1, "running", 2, 80, 20, 16, 59, 40, 1.5),
    ("prefills", 2, "prefilling", 0, 50, 50, 0, 25, 0, 0.2),
    ("waits", 3, "waiting", None, 10, 1234, 0, 0, 0, 0.1),
)
BATCH_PATH = re.compile(r"/debug/batch\?")
BATCH = {
    "max_num_seqs": 4,
    "sequences": [dict(zip(FIELDS, values, strict=True)) for values in SEQUENCES],
}


def metrics(step: int) -> str:
    """Return metrics of second `step`: 50 tokens/s, 10 requests/s with a TTFT of 10 to 20 ms."""
    return f"""
process_start_time_seconds 1.7e+09
kvasir_num_requests_running 3.0
kvasir_num_requests_waiting 2.0
kvasir_kv_cache_usage_ratio 0.25
kvasir_generation_tokens_total {1000 + 50 * step}
kvasir_requests_rejected_total{{reason="overloaded"}} {step}
kvasir_requests_rejected_total{{reason="unavailable"}} 0.0
kvasir_time_to_first_token_seconds_bucket{{le="0.01"}} 7
kvasir_time_to_first_token_seconds_bucket{{le="0.02"}} {7 + 10 * step}
kvasir_time_to_first_token_seconds_bucket{{le="+Inf"}} {7 + 10 * step}
"""


class FakeServer:
    """Answers polls with the metrics of one second after the other."""

    def __init__(self, page: Page) -> None:
        self.page, self.polls = page, 0
        self.refusal: tuple[str, int] | None = None
        page.route("**/metrics", self._metrics)
        page.route(BATCH_PATH, lambda route: route.fulfill(json=BATCH))
        stop_clock(page)

    def _metrics(self, route: Route) -> None:
        self.polls += 1
        if self.refusal is None:
            route.fulfill(body=metrics(self.polls))
        else:
            message, status = self.refusal
            route.fulfill(status=status, json={"error": {"message": message}})


@pytest.fixture
def server(open_page: Callable[..., Page], url: str) -> FakeServer:
    servers: list[FakeServer] = []
    page = open_page(f"{url}/#live", prepare=lambda page: servers.append(FakeServer(page)))
    expect(page.locator("#batch-table tr")).to_have_count(3)  # the end of the first poll
    return servers[0]


def figure(page: Page, name: str) -> Any:
    return page.locator(f"#live [data-figure='{name}']")


def random_samples(rng: random.Random) -> tuple[str, Samples]:
    """Return random metrics as text, and their samples."""
    lines, samples = ["# HELP a_metric Text, with \\\\ and a { in it.", ""], Samples()
    for _ in range(40):
        name = rng.choice(("a", "b:c", "_d9"))
        labels = {
            key: "".join(rng.choices('a {}\\"\n,=#é', k=rng.randrange(6)))
            for key in rng.sample("klm", 2)
        }
        value = rng.choice((0.0, -1.5, 6.60291584e08, 1e-12, math.inf, -math.inf))
        written = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
        escaped = [f'{key}="{text.translate(ESCAPES)}"' for key, text in labels.items()]
        comma, time = rng.choice(("", ",")), rng.choice(("", " 1700000000"))
        lines.append(f"{name}{{{','.join(escaped)}{comma}}} {written}{time}")
        samples.setdefault(name, []).append((labels, value))
    return "\n".join(lines), samples


def test_metrics_are_parsed_exactly(modules: Page) -> None:
    for seed in range(20):
        text, samples = random_samples(random.Random(seed))
        read = modules.evaluate(PARSE, [text, list(samples)])
        assert [[(labels, float(value)) for labels, value in one] for one in read] == list(
            samples.values()
        )


def test_quantiles_are_interpolated(modules: Page) -> None:
    """Compare with the definition: observations are spread evenly within a bucket."""
    rng, qs = random.Random(0), (0.01, 0.5, 0.9, 0.99, 1.0)
    for _ in range(20):
        bounds = sorted(rng.uniform(0.001, 10) for _ in range(5))
        sizes = [rng.randrange(4) for _ in bounds] + [rng.randrange(2)]
        cumulative = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        found = modules.evaluate(
            QUANTILES, [list(zip([*bounds, None], cumulative, strict=True)), qs]
        )
        if not cumulative[-1]:
            assert found == [None] * len(qs)
            continue
        for q, value in zip(qs, found, strict=True):
            rank = q * cumulative[-1]
            place = next(n for n, count in enumerate(cumulative) if count >= rank)
            if place == len(bounds):
                assert value == bounds[-1]
                continue
            lower, within = ([0.0, *bounds][place], rank - (cumulative[place] - sizes[place]))
            assert value == pytest.approx(lower + (bounds[place] - lower) * within / sizes[place])


def test_figures_show_the_metrics(server: FakeServer) -> None:
    page = server.page
    expect(figure(page, "output")).to_have_text(NO_VALUE)  # a rate needs two snapshots
    page.clock.run_for(1000)
    expect(figure(page, "ttft-p50")).to_have_text("15 ms")
    shown = {"running": "3", "waiting": "2", "kv": "25 %", "ttft-p90": "19 ms"}
    for name, text in (shown | dict.fromkeys(("itl-p50", "hits"), NO_VALUE)).items():
        expect(figure(page, name)).to_have_text(text)
    expect(figure(page, "output")).not_to_have_text(NO_VALUE)
    expect(page.locator("#live-reasons")).to_contain_text(f"{server.polls} overloaded")
    slider = page.get_by_role("slider", name="Running")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_attribute("aria-valuetext", "1 s ago: 3")


def test_rates_and_percentiles_have_windows(modules: Page) -> None:
    """Poll at irregular times a server that does the same work between any two polls."""
    rng = random.Random(0)
    at = list(accumulate(rng.uniform(0.2, 8) for _ in range(60)))
    moments = [(metrics(step), when) for step, when in enumerate(at)]
    points, _ = modules.evaluate(FIGURES, [moments, None])
    assert [point["at"] for point in points] == [when for when in at if at[-1] - when <= 120]

    for n, point in enumerate(points, start=len(at) - len(points)):
        of_rates, of_others = (
            next(i for i, when in enumerate(at) if at[n] - when <= seconds) for seconds in (5, 30)
        )
        rate = pytest.approx(50 * (n - of_rates) / (at[n] - at[of_rates])) if n > of_rates else None
        assert point["output"] == rate
        assert point["rejected"] == n - of_others
        assert point["ttft-p50"] == pytest.approx(0.015)


def test_figures_are_of_one_model(modules: Page) -> None:
    def moment(step: int) -> str:
        lines = []
        for model, rate, bound in (("first", 50, "0.02"), ("second", 7, "0.01"), ("", 1, None)):
            of = f'model="{model}"'
            lines.append(f'kvasir_requests_rejected_total{{{of},reason="overloaded"}} {rate}')
            if bound is None:
                continue
            lines.append(f"kvasir_generation_tokens_total{{{of}}} {rate * step}")
            for le in ("0.01", "0.02", "+Inf"):
                count = 0 if (bound, le) == ("0.02", "0.01") else step
                name = "kvasir_time_to_first_token_seconds_bucket"
                lines.append(f'{name}{{{of},le="{le}"}} {count}')
        return "\n".join(lines)

    for model, rate, latency in (("first", 50, 0.015), ("second", 7, 0.005)):
        points, rejected = modules.evaluate(FIGURES, [[(moment(0), 0), (moment(1), 1)], model])
        assert (points[-1]["output"], points[-1]["ttft-p50"]) == (rate, pytest.approx(latency))
        assert rejected == {"overloaded": rate + 1}


def test_the_batch_shows_its_sequences(server: FakeServer) -> None:
    page = server.page
    rows = page.locator("#batch-table tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0).locator("th")).to_have_attribute("title", "a-name-longer-than-the-table")
    cells = rows.nth(0).locator("td").all_text_contents()
    assert cells == ["running", "2", "20", "16", "59", "40 of 80 ", "1.5"]
    assert rows.nth(0).locator("progress").evaluate("one => one.value") == 0.5
    assert rows.nth(2).locator("td").all_text_contents()[:3] == ["waiting", NO_VALUE, "1,234"]
    states = page.locator("#batch-slots .slot").evaluate_all(
        "slots => slots.map((slot) => slot.dataset.state)"
    )
    assert states == ["prefilling", "free", "running", "free"]
    picture = page.get_by_role("img", name="4 slots: 1 running, 1 prefilling; 1 waiting for a slot")
    expect(picture).to_be_visible()
    expect(page.locator("#batch-waiting .waiter")).to_have_count(1)


def test_a_hidden_view_does_not_poll(server: FakeServer) -> None:
    page = server.page
    page.get_by_role("button", name="Pause").click()
    page.evaluate(LATER_REQUEST)
    polls = server.polls
    page.clock.run_for(5000)
    page.evaluate(LATER_REQUEST)
    assert server.polls == polls
    page.get_by_role("button", name="Resume").click()
    page.wait_for_function("document.getElementById('live-pause').textContent === 'Pause'")
    page.locator("header a[href='#model']").click()
    page.evaluate(LATER_REQUEST)
    polls = server.polls
    page.clock.run_for(5000)
    page.evaluate(LATER_REQUEST)
    assert server.polls == polls


@pytest.mark.refusals
def test_errors_are_shown_and_polling_goes_on(server: FakeServer) -> None:
    page = server.page
    server.refusal = "the server is shutting down", 503
    page.clock.run_for(1000)
    expect(page.locator("#live-error")).to_contain_text("the server is shutting down")
    server.refusal = None
    page.clock.run_for(1000)
    expect(page.locator("#live-error")).to_be_hidden()


@pytest.mark.refusals
@pytest.mark.parametrize("status", [404, 401])
def test_polling_ends_where_metrics_are_refused(server: FakeServer, status: int) -> None:
    """It begins again with a new key, or when the view is opened again."""
    page = server.page
    server.refusal = "no such page here", status
    page.clock.run_for(1000)
    expect(page.locator("#live-error")).to_contain_text("no such page here")
    expect(page.locator("#live-pause")).to_be_hidden()
    polls = server.polls
    page.clock.run_for(5000)
    page.evaluate(LATER_REQUEST)
    assert server.polls == polls
    server.refusal = None
    if status == 401:
        page.get_by_label("API key").fill("another")
        page.keyboard.press("Enter")
    else:
        page.locator("header a[href='#model']").click()
        page.locator("header a[href='#live']").click()
    expect(page.locator("#live-error")).to_be_hidden()
    expect(page.locator("#live-pause")).to_be_visible()
    assert server.polls > polls


def test_a_real_server_shows_its_requests(open_page: Callable[..., Page], url: str) -> None:
    page = open_page(f"{url}/#live")
    body = {"prompt": "def f", "max_tokens": 100, "ignore_eos": True}
    assert page.request.post(f"{url}/v1/completions", data=body).ok
    expect(figure(page, "prompt")).not_to_have_text(NO_VALUE)
    expect(figure(page, "running")).to_have_text("0")


def test_requests_can_be_sent_from_an_empty_batch(page: Page) -> None:
    def shorten(route: Route) -> None:
        route.continue_(post_data=route.request.post_data_json | {"max_tokens": 16})

    page.route("**/v1/completions", shorten)
    page.locator("header a[href='#live']").click()
    button = page.get_by_role("button", name="Send 16 requests")
    with page.expect_response("**/v1/completions") as sent:
        button.click()
    assert len(sent.value.json()["choices"]) == 16
    expect(page.locator("#batch-idle")).to_be_visible()
    expect(button).to_be_visible()


def test_all_sent_requests_are_in_view(page: Page) -> None:
    """The table of sixteen rows does not scroll, also if only four of them have a slot."""
    sent = [
        ("sent", n, "running" if n < 4 else "waiting", n if n < 4 else None, 256, 4, 0, 4, n, 0.1)
        for n in range(16)
    ]
    batch = {"sequences": [dict(zip(FIELDS, values, strict=True)) for values in sent]}
    page.route(BATCH_PATH, lambda route: route.fulfill(json=batch))
    page.locator("header a[href='#live']").click()
    expect(page.locator("#batch-table tr")).to_have_count(16)
    scrolls = "box => box.scrollHeight > box.clientHeight"
    assert not page.locator("#batch-scroll").evaluate(scrolls)


@pytest.mark.refusals
def test_a_refusal_of_the_sent_requests_stays(page: Page) -> None:
    page.locator("header a[href='#live']").click()
    page.route("**/v1/completions", lambda route: route.fulfill(status=507, body=""))
    page.get_by_role("button", name="Send 16 requests").click()
    expect(page.locator("#live-error")).to_contain_text("507")
    for _ in range(2):
        with page.expect_response(BATCH_PATH):
            pass
    expect(page.locator("#live-error")).to_contain_text("507")


@pytest.mark.refusals
def test_figures_of_a_server_that_is_gone_have_their_time(page: Page) -> None:
    page.locator("header a[href='#live']").click()
    expect(page.locator("#live-send")).to_be_visible()
    page.route("**/metrics", lambda route: route.fulfill(status=502, body=""))
    expect(page.locator("#live-error")).to_contain_text("the figures are as of")
