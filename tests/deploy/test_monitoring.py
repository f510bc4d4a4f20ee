"""Wrong names of metrics and labels are found, and right ones are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.monitoring import Shown, unknown_labels, unknown_names

SHOWN = """# TYPE kvasir_waiting gauge
kvasir_waiting 3.0
# TYPE kvasir_ends_total counter
kvasir_ends_total{reason="stop"} 1.0
# TYPE kvasir_step_seconds histogram
"""


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    path = tmp_path / "metrics"
    path.write_text(SHOWN, encoding="utf-8")
    return Shown(path.as_uri())


def test_names_that_are_shown_or_recorded_are_known(shown: Shown) -> None:
    text = "rate(kvasir_step_seconds_bucket[1m]) + kvasir_waiting + job:kvasir_step:rate1m"
    text += " + kvasir_wating"
    assert unknown_names([("here", text)], shown.names) == {"here: kvasir_wating"}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('kvasir_ends_total{reason="stop",pod=~"a"}', set()),
        ('kvasir_ends_total{cause="stop"}', {"here: kvasir_ends_total{cause}"}),
        ("sum by (job, cause) (kvasir_ends_total)", {"here: cause"}),
        ('label_values(kvasir_ends_total{job=~"$job"}, reason)', set()),
        ("label_values(kvasir_ends_total, cause)", {"here: kvasir_ends_total, cause"}),
        ('label_values(kvasir_waiting{job="a"}, reason)', {"here: kvasir_waiting, reason"}),
    ],
)
def test_labels_belong_to_their_metric(text: str, wrong: set[str], shown: Shown) -> None:
    assert unknown_labels([("here", text)], shown, set()) == wrong
