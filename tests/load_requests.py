"""Random requests of a load test with times in whole ticks, whose sums are exact."""

from __future__ import annotations

from random import Random

from kvasir.loadtest.locust.request_log import Request

TICK = 1 / 64  # seconds


def random_requests(random: Random, n: int = 80) -> list[Request]:
    """Draw requests in the order of sending.

    One in five fails, half of these before the first token. One in ten of the others is cancelled.
    No event comes with the end.
    """
    requests = []
    for sent in random.sample(range(640), n):
        failed = random.random() < 0.2
        if failed and random.random() < 0.5:
            ended = sent + random.randint(1, 9)
            requests.append(Request(sent * TICK, ended * TICK, None, None, (), 0, failed))
            continue
        ttft, *gaps = (random.randint(1, 9) * TICK for _ in range(random.randint(1, 9)))
        e2e = ttft + sum(gaps) + random.randint(1, 9) * TICK
        is_whole = not failed and random.random() < 0.9
        known = (ttft, e2e if is_whole else None, tuple(gaps))
        requests.append(
            Request(sent * TICK, sent * TICK + e2e, *known, random.randint(1, 40), failed)
        )
    return sorted(requests, key=lambda request: request.sent)
