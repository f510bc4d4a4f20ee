"""`kvasir bench steps` draws what a live server computed, for whom and when."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from typer.testing import CliRunner, Result

from kvasir.__main__ import app
from kvasir.loadtest.steps import Row, rows_of
from kvasir.server.process.serve import bind
from tests.kit.fake_runner import FakeRunner
from tests.kit.live import KEY, live
from tests.kit.serving import VOCAB_SIZE


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "steps", *arguments, "--json"])


def test_a_live_server_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "steps.png"
    with live(FakeRunner(VOCAB_SIZE, max_model_len=300)) as server:
        before = bench(server.url, "--api-key", KEY, "--out", str(out))
        assert (before.exit_code, out.exists()) == (1, False)
        with server.http() as client:
            for n_prompt in (200, 3):
                body = {"prompt": [5] * n_prompt, "max_tokens": 4}
                assert client.post("/v1/completions", json=body).status_code == 200
        drawn = bench(server.url, "--api-key", KEY, "--out", str(out))
    assert drawn.exit_code == 0, drawn.output
    assert json.loads(drawn.stdout)["sequences"] == 2
    assert out.stat().st_size > 1000


def test_a_server_that_is_away_is_named() -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    refused = bench(url)
    assert refused.exit_code == 1
    assert url in refused.stderr


def test_each_sequence_has_a_row_of_its_steps() -> None:
    """The second arrives before the first step; of the third only the end is known."""

    def part(number: int, waited: float, n_tokens: int) -> dict[str, float]:
        return {"sequence_id": number, "prompt_tokens": n_tokens, "waited": waited}

    steps = [
        {"ago": 3.0, "seconds": 1.0, "prompts": [part(1, 0.5, 9)], "streams": [3]},
        {"ago": 2.0, "seconds": 0.5, "prompts": [part(1, 1.5, 9), part(2, 0.25, 4)], "streams": []},
        {"ago": 1.0, "seconds": 0.25, "prompts": [], "streams": [1, 2]},
    ]
    assert rows_of(steps) == [
        Row(0.0, 9, [(0.0, 1.0), (1.0, 0.5)], [(2.0, 0.25)]),
        Row(0.0, None, [], [(0.0, 1.0)]),
        Row(0.75, 4, [(1.0, 0.5)], [(2.0, 0.25)]),
    ]
