"""The recording of the page in README: `make demo`."""

from __future__ import annotations

from collections.abc import Callable

from PIL import ImageChops
from playwright.sync_api import Page

from tests.browser import demo

_LEVELS = 48  # of 256, by which Chromium's edges of lines may differ
_SHARE = 0.002  # of a frame's pixels


def test_two_recordings_are_the_same(open_page: Callable[..., Page], url: str) -> None:
    first, second = (
        demo.record(open_page(url, viewport=demo.SIZE, reduced_motion="reduce"), n_tokens=3)
        for _ in range(2)
    )
    assert first.texts == second.texts
    assert first.durations == second.durations
    for number, (one, other) in enumerate(zip(first.frames, second.frames, strict=True)):
        difference = ImageChops.difference(one, other).convert("L")
        differing = sum(difference.histogram()[_LEVELS:])
        assert differing <= _SHARE * one.width * one.height, f"frame {number}"
