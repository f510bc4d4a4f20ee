"""A process of attackers: python -m tests.faults.attackers runs the attacks that each line names.

With all of an attack it yields its processor to the server, so that its own work is no stall.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.faults.attacks import ATTACKS
from tests.faults.client import Site
from tests.faults.report import Report


async def _attack(names: list[str], port: int, folder: str, seed: int, few: bool) -> dict[str, Any]:
    """Run attacks at once, and return what they report together."""
    if not few:
        os.nice(10 - os.nice(0))
    whole = Report("+".join(names))

    async def run(name: str) -> Report:
        attack, report = ATTACKS[name], Report(name)
        n = attack.few if few else attack.n
        try:
            await attack.run(Site(port, Path(folder), random.Random(f"{seed} {name}")), n, report)
        except Exception as error:  # the server has gone, or answers nonsense
            report.lost.append(f"{name} broke off: {error!r}")
        return report

    for report in await asyncio.gather(*map(run, names)):
        whole.tried += report.tried
        whole.statuses += report.statuses
        whole.lost += report.lost
        whole.note = "; ".join(filter(None, (whole.note, report.note)))
    told = {"tried": whole.tried, "lost": whole.lost[:50], "n_lost": len(whole.lost)}
    return told | {"note": whole.note, "statuses": whole.statuses}


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        told = asyncio.run(_attack(**job)) if job else {}
        print(json.dumps(told), flush=True)  # noqa: T201
