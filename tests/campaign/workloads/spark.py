"""A query of Spark passes one queue on to another, and its driver is killed: what comes out is what went in, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from queen.storage.database import UNAVAILABLE_ERRORS
from tests.campaign.history import Outcome, Violation
from tests.campaign.workloads.log import LogWorkload
from tests.support.database import stored_log

_DRAIN_SECONDS = 400.0
_ROOT = Path(__file__).parents[3]


class SparkWorkload(LogWorkload):
    """Producers push; a driver in its own process reads and writes, straight from and to PostgreSQL."""

    name = "spark"
    one_shard = True
    groups = ()

    @property
    def target(self) -> str:
        return f"{self.queue}-out"

    async def prepare(self) -> None:
        await super().prepare()
        await self.configure(self.target)

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super().clients(), self.drive()]

    async def drive(self) -> None:
        """Start the driver again whenever it has ended: it is killed, and gives up when PostgreSQL is unavailable."""
        while not self.stage.healed.is_set():
            driving = asyncio.create_task(self._run_driver())
            try:
                await self._until_written_or_over(driving)
            finally:
                await _end(driving)
        driving = asyncio.create_task(self._run_driver())
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self._missing():
                    if driving.done():
                        driving = asyncio.create_task(self._run_driver())
                    await asyncio.sleep(0.5)
        except TimeoutError:
            # The check says what is missing.
            return
        finally:
            await _end(driving)

    async def _until_written_or_over(self, driving: asyncio.Task[None]) -> None:
        """A moment after the driver has written something, in which it may be staging, publishing or taking note."""
        before = None
        while not driving.done() and not self.stage.healed.is_set():
            with contextlib.suppress(asyncpg.PostgresError, *UNAVAILABLE_ERRORS):
                _, came_out = await self._stored()
                written = sum(map(len, came_out.values()))
                before = written if before is None else before
                if written > before:
                    break
            await asyncio.sleep(0.2)
        await asyncio.sleep(self.chance.uniform(0, 2))

    async def _run_driver(self) -> None:
        dsn = self.site.front_dsn(self.site.databases[0])
        call = self.history.begin(f"{self.name}/driver", "driver", {})
        with (self.site.directory / "driver.log").open("ab") as log:
            driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.campaign.spark_driver", dsn),
                *(str(self.site.directory / "checkpoint"), self.queue, self.target),
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                # Java and the processes of tasks die with the driver.
                start_new_session=True,
            )
        try:
            await driver.wait()
        finally:
            self.history.end(call, Outcome.OK, answer="ended" if driver.returncode is not None else "killed")
            if driver.returncode is None:
                os.killpg(driver.pid, signal.SIGKILL)
                await driver.wait()

    async def _missing(self) -> bool:
        came_in, came_out = await self._stored()
        return came_in != came_out

    async def _stored(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The ids in every partition of both queues, in order."""
        found = []
        async with self.site.connection() as connection:
            for queue in (self.queue, self.target):
                log = await stored_log(connection, queue)
                found.append(
                    {
                        name: [msgspec.json.decode(one.payload)["id"] for one in messages]
                        for name, messages in log.items()
                        if messages
                    }
                )
        return found[0], found[1]

    async def check(self) -> list[Violation]:
        return [*await super().check(), *compare(self.name, *await self._stored())]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def compare(workload: str, came_in: dict[str, list[str]], came_out: dict[str, list[str]]) -> list[Violation]:
    """Every partition came out as it went in."""
    found = []
    for partition in sorted(came_in.keys() | came_out.keys()):
        wanted, got = came_in.get(partition, []), came_out.get(partition, [])
        if wanted == got:
            continue
        kind = "doubled" if len(set(got)) < len(got) else "lost" if set(wanted) - set(got) else "reordered"
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, got, strict=False)))
        after = slice(same, same + 3)
        text = f"{partition}: {len(got)} of {len(wanted)}; from {same} on {wanted[after]} became {got[after]}"
        found.append(Violation(workload, kind, text))
    return found


def has_java() -> bool:
    return shutil.which("java") is not None or "JAVA_HOME" in os.environ
