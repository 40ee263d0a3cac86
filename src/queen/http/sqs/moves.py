"""Tasks that move the messages of a dead-letter queue back to where they came from, or to another queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import asyncpg
from msgspec.structs import replace

from queen.concurrency import BackgroundTasks
from queen.errors import QueenError
from queen.http.sqs.attributes import arn_of, queue_of_arn
from queen.http.sqs.errors import SqsError, invalid_parameter
from queen.http.sqs.messages import Outgoing, Received, read_handle
from queen.http.sqs.queues import MessageStore, QueueCatalog, SqsQueue
from queen.storage.database import Database, Record

log = logging.getLogger(__name__)

_BATCH: Final = 10
# While a message is moved it is not received; if the server dies meanwhile, it is visible again after this.
_MOVING_SECONDS: Final = 30
_SHOWN: Final = 10


class MoveTasks:
    """Runs the tasks that were started at this worker. One whose worker dies has failed, and can be started again."""

    def __init__(self, database: Database, catalog: QueueCatalog, store_of: Callable[[SqsQueue], MessageStore]) -> None:
        self._database = database
        self._catalog = catalog
        self._store_of = store_of
        self._tasks = BackgroundTasks()
        self._stopping = asyncio.Event()

    async def stop(self) -> None:
        self._stopping.set()
        await self._tasks.finish()

    async def start(
        self,
        source: SqsQueue,
        destination: SqsQueue | None,
        per_second: int | None,
        check_admitted: Callable[[str], object],
    ) -> str:
        """The id of a new task; without a `destination`, messages go back to where they came from.

        `check_admitted` raises `SqsError` for the names of queues that the sender may not use.
        """
        if not await self._catalog.sources(source.name, "", 1):
            raise invalid_parameter("Source queue must be configured as a Dead Letter Queue.")
        total = (await self._store_of(source).counts(source)).visible
        id = uuid.uuid4()
        target = destination.name if destination is not None else None
        if not await self._database.fetch("sqs_start_move", id, source.name, target, per_second, total):
            raise invalid_parameter(
                "There is already a task running. Only one active task is allowed for a source queue."
            )
        self._tasks.spawn(self._run(id, source, destination, per_second, check_admitted))
        return str(id)

    async def source_of(self, handle: str) -> str:
        """The queue whose messages a task moves."""
        try:
            rows = await self._database.fetch("sqs_move_source", uuid.UUID(handle))
        except ValueError:
            rows = []
        if not rows:
            raise SqsError("ResourceNotFoundException", "The specified task does not exist.")
        return str(rows[0]["source"])

    async def cancel(self, handle: str) -> int:
        """How many messages the task has moved."""
        for row in await self._database.fetch("sqs_cancel_move", uuid.UUID(handle)):
            return int(row["moved"])
        raise SqsError("ResourceNotFoundException", "The specified task is not running.")

    async def list(self, source: SqsQueue, limit: int, region: str) -> list[Mapping[str, Any]]:
        rows = await self._database.fetch("sqs_moves", source.name, min(limit, _SHOWN))
        return [_shown(row, region) for row in rows]

    async def _run(
        self,
        id: uuid.UUID,
        source: SqsQueue,
        destination: SqsQueue | None,
        per_second: int | None,
        check_admitted: Callable[[str], object],
    ) -> None:
        failure = None
        try:
            await self._move_all(id, source, destination, per_second, check_admitted)
        except (SqsError, QueenError, asyncpg.PostgresError) as error:
            failure = str(error)
            log.warning("the task %s that moves messages of %s failed: %s", id, source.name, error)
        await self._database.fetch("sqs_end_move", id, "COMPLETED" if failure is None else "FAILED", failure)

    async def _move_all(
        self,
        id: uuid.UUID,
        source: SqsQueue,
        destination: SqsQueue | None,
        per_second: int | None,
        check_admitted: Callable[[str], object],
    ) -> None:
        store = self._store_of(source)
        batch = min(_BATCH, per_second) if per_second else _BATCH
        while received := await store.receive(source, batch, _MOVING_SECONDS, 0.0):
            for message in received:
                target = destination or await self._origin(message)
                check_admitted(target.name)
                await self._store_of(target).send(target, [moved_message(message, f"move:{id}:{message.id}")])
            await store.delete(source, [read_handle(message.handle, source.name) for message in received])
            (row,) = await self._database.fetch("sqs_move_progress", id, len(received))
            if row["status"] != "RUNNING":
                return
            with contextlib.suppress(TimeoutError):
                # At least one iteration of the event loop, for the tasks that wait for it.
                await asyncio.wait_for(self._stopping.wait(), len(received) / per_second if per_second else 0.001)
            if self._stopping.is_set():
                raise SqsError("InternalError", "the server that moved the messages was stopped")

    async def _origin(self, message: Received) -> SqsQueue:
        arn = message.envelope.source
        queue = await self._catalog.find(queue_of_arn(arn, "SourceArn")) if arn else None
        if queue is None:
            raise SqsError("CouldNotDetermineMessageSource", "CouldNotDetermineMessageSource")
        return queue


def moved_message(message: Received, key: str, source: str = "") -> Outgoing:
    """A message as it is sent to another queue: with the id and time it had; `source`: the ARN where it failed."""
    envelope = replace(message.envelope, id=message.id, sent=message.sent_ms, source=source)
    return Outgoing(body=message.body, envelope=envelope, delay=0, key=key)


def _shown(row: Record, region: str) -> dict[str, Any]:
    shown = {
        "Status": row["status"],
        "SourceArn": arn_of(row["source"], region),
        "ApproximateNumberOfMessagesMoved": row["moved"],
        "ApproximateNumberOfMessagesToMove": row["total"],
        "StartedTimestamp": int(row["started_at"].timestamp() * 1000),
    }
    if row["status"] == "RUNNING":
        shown["TaskHandle"] = str(row["id"])
    if row["destination"]:
        shown["DestinationArn"] = arn_of(row["destination"], region)
    if row["per_second"]:
        shown["MaxNumberOfMessagesPerSecond"] = row["per_second"]
    if row["failure"]:
        shown["FailureReason"] = row["failure"]
    return shown
