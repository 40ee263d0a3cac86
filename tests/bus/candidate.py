"""A process that stands for the background jobs, as a worker does, and says when it is elected and when it is not."""

from __future__ import annotations

import asyncio
import sys

from queen.broker.maintenance.jobs import JobRunner
from queen.storage.database import Database


async def main(dsn: str) -> None:
    janitor = JobRunner(Database(dsn), lambda push_listener: [])
    janitor.start()
    elected = False
    while True:
        await asyncio.sleep(0.01)
        if janitor.elected.is_set() != elected:
            elected = not elected
            print("elected" if elected else "lost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
