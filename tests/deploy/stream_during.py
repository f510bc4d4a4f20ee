"""Stream completions while a command runs: python -m tests.deploy.stream_during URL COMMAND…

Eight clients send requests in turn, from before the command until after it, and no request may
fail. Exit code 1 if any failed, or the command's own.
"""

from __future__ import annotations

import asyncio
import sys

from tests.deploy.rolling_restart import BETWEEN, N_CLIENTS, Load


async def main(url: str, *command: str) -> int:
    load = Load(url)
    clients = [asyncio.create_task(load.client()) for _ in range(N_CLIENTS)]
    await load.wait_for(BETWEEN)
    code = await (await asyncio.create_subprocess_exec(*command)).wait()
    await load.wait_for(BETWEEN)
    load.is_stopping = True
    await asyncio.gather(*clients)
    failed = [answer.error for answer in load.answers if answer.error is not None]
    print(f"sent {len(load.answers)}, failed {len(failed)}", *sorted(set(failed)), sep="\n  ")  # noqa: T201
    return code or int(bool(failed))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
