"""Micro-batches by the sink of Spark, from tasks that are tried again and drivers that forget: each is there once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import asyncpg
import msgspec

from queen import QueenError as ClientError
from queen.errors import QueenError as ServerError
from queen.spark.sink.publishers import ServerPublisher, ShardPublisher, StagedPart
from queen.wire.push import PushItem
from tests.campaign.batch_checks import Batches, check_batches
from tests.campaign.history import Outcome, Violation
from tests.campaign.workload import Workload
from tests.support.database import stored_log

_PARTITIONS = 2
_ERRORS = (ServerError, ClientError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
_GRACE_SECONDS = 5.0


class StagesWorkload(Workload):
    """Two queries: one publishes through a server, the other straight in PostgreSQL."""

    name = "stages"
    one_shard = True
    tasks: ClassVar[int] = 2

    def queue(self, run: str) -> str:
        return f"{self.name}-{run}"

    async def prepare(self) -> None:
        for run in ("server", "direct"):
            await self.configure(self.queue(run))

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        url, dsn = self.site.urls[0], self.site.front_dsn(self.site.databases[0])
        return [
            self.query("server", lambda: ServerPublisher(url, None)),
            self.query(
                "direct",
                lambda: ShardPublisher([dsn], encryption_keys=(), dedup_window=3600.0, outage_grace=_GRACE_SECONDS),
            ),
        ]

    async def query(self, run: str, connect: Callable[[], ServerPublisher | ShardPublisher]) -> None:
        """A driver: it writes batch after batch, and one again of which it does not know whether it was published."""
        loop = asyncio.get_running_loop()
        # Connections belong to the thread that made them. It is not waited for: this loop carries what it waits for.
        thread = ThreadPoolExecutor(1)
        try:
            publisher = await loop.run_in_executor(thread, connect)
            batch = 0
            while not self.stage.produced.is_set():
                rows = [self.chance.randint(1, 5) for _ in range(self.tasks)]
                # A driver that dies after a batch was published and before it has noted that writes it again.
                for _ in range(1 + (self.chance.random() < 0.2)):
                    while not await self.write(thread, publisher, run, batch, rows):
                        await self.back_off()
                batch += 1
                await self.pause()
            await loop.run_in_executor(thread, publisher.close)
        finally:
            thread.shutdown(wait=False)

    async def write(
        self,
        thread: ThreadPoolExecutor,
        publisher: ServerPublisher | ShardPublisher,
        run: str,
        batch: int,
        rows: Sequence[int],
    ) -> bool:
        """Stage the rows of every task, some of them by an attempt more that does not count, and publish the batch."""
        loop = asyncio.get_running_loop()
        call = self.history.begin(f"{self.name}/{run}", "publish", {"batch": batch, "rows": list(rows)})
        try:
            parts: list[StagedPart] = []
            for task, count in enumerate(rows):
                for counts in (False, True) if self.chance.random() < 0.2 else (True,):
                    staged = await loop.run_in_executor(
                        thread, self._stage, publisher, run, batch, _names(batch, task, count)
                    )
                    parts += staged if counts else ()
            await loop.run_in_executor(thread, publisher.publish, run, batch, parts)
        except _ERRORS as error:
            self.history.end(call, Outcome.UNKNOWN, error=f"{type(error).__name__}: {error}")
            return False
        self.history.end(call, Outcome.OK)
        return True

    def _stage(
        self, publisher: ServerPublisher | ShardPublisher, run: str, batch: int, names: Sequence[str]
    ) -> list[StagedPart]:
        staging = publisher.begin(run, batch)
        staging.add(
            [
                PushItem(self.queue(run), f"p{number % _PARTITIONS}", msgspec.Raw(msgspec.json.encode(name)))
                for number, name in enumerate(names)
            ]
        )
        return staging.finish()

    async def check(self) -> list[Violation]:
        found: list[Violation] = []
        for run in ("server", "direct"):
            calls = [call for call in self.calls("publish") if call.client == f"{self.name}/{run}"]
            async with self.site.connection() as connection:
                log = await stored_log(connection, self.queue(run))
            stored = {
                partition: [msgspec.json.decode(one.payload, type=str) for one in messages]
                for partition, messages in log.items()
            }
            wanted = {call.args["batch"]: _batch(call.args["batch"], call.args["rows"]) for call in calls}
            found += check_batches(self.name, calls, Batches(wanted, stored))
        return found


def _names(batch: int, task: int, count: int) -> list[str]:
    return [f"{batch}/{task}/{number}" for number in range(count)]


def _batch(batch: int, rows: Sequence[int]) -> dict[str, list[str]]:
    """What a batch adds to each partition, in order."""
    added: dict[str, list[str]] = {}
    for task, count in enumerate(rows):
        for number, name in enumerate(_names(batch, task, count)):
            added.setdefault(f"p{number % _PARTITIONS}", []).append(name)
    return added
